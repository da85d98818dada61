"""Inspects files: detects the kind from the content, and shows the facts as tables or JSON."""
