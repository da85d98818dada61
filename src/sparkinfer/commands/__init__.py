"""Commands that are too long for cli.py, and code shared by all commands."""
