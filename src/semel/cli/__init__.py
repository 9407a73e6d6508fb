"""The `semel` command. Light to start: what a command needs is imported when it runs."""

from __future__ import annotations

import sys

from semel.cli.app import app
from semel.errors import SemelError

__all__ = ["main"]


def main() -> None:
    """Run the command line; an error of ours is one line on stderr and exit code 2."""
    try:
        app()
    except SemelError as error:
        sys.stderr.write(f"semel: {error}\n")
        sys.exit(2)
