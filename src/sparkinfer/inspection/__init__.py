"""What a file holds: recognised by content, as facts, as tables, as JSON."""
