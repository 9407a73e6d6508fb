"""The `semel` command. Light to start: what a command needs is imported when it runs."""

from __future__ import annotations

import sys

from semel.cli.error_line import print_error
from semel.engine.owner import end_with_owner
from semel.errors import SemelError

__all__ = ["main"]

end_with_owner()  # a process that an engine spawns imports this module first, and calls nothing else of ours for long


def main() -> None:
    """Run the command line; an error of ours is a line on stderr for each thing that is wrong, and exit code 2."""
    code = _run()
    if "torch" in sys.modules:
        from semel.engine.quick_exit import exit_quickly

        exit_quickly(code)
    sys.exit(code)


def _run() -> int:
    """Return the exit code; an error that nobody expects is raised."""
    from semel.cli.app import app

    try:
        app()
    except SemelError as error:
        print_error(str(error))
        return 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
