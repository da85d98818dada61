"""The command line: `hotsplit`, or `python -m hotsplit`.

This module imports nothing before `main`, so that Ctrl-C prints one line even during the imports.
Exit codes are in commands.exit_codes, commands in commands.all_commands."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns 0, 1 after a failure, 2 after wrong usage, 128 + n if ended by signal
    n, 70 after a bug in this program."""
    try:
        import sys

        if sys.platform == "win32":  # it lacks the locks and signals that are used from here on
            sys.stderr.write("hotsplit: Windows itself is not supported; use it under WSL 2\n")
            return 1
        from hotsplit.commands.exit_codes import run

        return run(argv)
    except KeyboardInterrupt as error:
        import sys

        is_reader = sys.argv[1:2] in (["inspect"], ["doctor"])  # as in system.signals
        left = "" if is_reader else "; nothing half-written was left"
        sys.stderr.write(f"hotsplit: interrupted{left}\n")
        return getattr(error, "exit_code", 130)
