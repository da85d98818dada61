"""This process and its machine: signals, memory, processors, progress and log lines."""
