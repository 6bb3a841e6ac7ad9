"""Runs inside the host's own venv: engines, writers and the checks of what they wrote."""
