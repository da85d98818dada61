"""Inspection of a file: detected from content, as facts, as tables, as JSON."""
