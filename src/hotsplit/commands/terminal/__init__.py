"""The terminal: prompts, chats, and texts that commands print."""
