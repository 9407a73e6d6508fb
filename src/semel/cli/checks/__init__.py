"""Checks before anything starts: of flags, the model, keys, addresses, ports and memory. `--skip-checks` skips them.

A check costs milliseconds, reads files, and binds a port at most. What only the engine can know, it finds out itself.
"""

from semel.cli.checks.finding import Finding, Verdict, refuse, warn

__all__ = ["Finding", "Verdict", "refuse", "warn"]
