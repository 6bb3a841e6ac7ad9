"""Everything that runs on the host: standard library only, Python 3.9 and newer; imports nothing from above."""
