"""Everything that runs on the host. Standard library only, Python 3.9 and newer; imports nothing from above this package."""
