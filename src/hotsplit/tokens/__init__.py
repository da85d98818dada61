"""The text forms of a tokenizer that conversion and runtime share."""
