"""Reads files from outside with every length checked, and writes files whole or not at all."""
