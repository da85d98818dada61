"""Inspects a file: detects its kind from content, and shows its facts as tables or JSON."""
