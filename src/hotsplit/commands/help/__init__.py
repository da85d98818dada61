"""Help texts: groups of commands and options, and examples."""
