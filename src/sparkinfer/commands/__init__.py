"""Commands that are too long for cli.py, and what all commands share."""
