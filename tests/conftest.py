import os

from hypothesis import settings

# Fixtures that several files use; here because a plain import would shadow them in every test.
pytest_plugins = ["link_fixtures"]

# CI tries the same cases each time, so that a red run speaks of the change at hand; at a desk new ones are tried.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
