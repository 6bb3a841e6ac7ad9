"""The SSH connection under a Link: configuration, route, host keys, authentication, processes and transfers."""
