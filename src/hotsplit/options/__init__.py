"""Options that several commands share: of an engine, its caches, its key selection."""
