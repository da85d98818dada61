"""This process and its machine: signals, memory, progress and log lines."""
