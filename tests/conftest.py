# Fixtures that several files use; here because a plain import would shadow them in every test.
pytest_plugins = ["link_fixtures"]
