"""Bodies of commands that are more than a call: what `cli` asks them, they do and print."""
