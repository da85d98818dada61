"""Lets `python -m sparkinfer` and torchrun start the command line."""

from sparkinfer.cli import main

raise SystemExit(main())
