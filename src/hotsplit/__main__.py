"""Lets `python -m hotsplit` and torchrun start the command line."""

from hotsplit.cli import main

raise SystemExit(main())
