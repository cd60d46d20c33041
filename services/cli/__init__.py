"""The command line, `headrace`: start the parts, ask, look, repair."""

from headrace.cli.app import main

__all__ = ["main"]
