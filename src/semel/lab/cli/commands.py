"""The commands of the workshop under `semel`: bench, prove, simulate, testing, verify."""

from __future__ import annotations

import typer

from semel.cli.flags import Call, command
from semel.lab.bench.settings import VerifySettings
from semel.lab.cli.benches import bench
from semel.lab.cli.proving import ProveSettings
from semel.lab.cli.simulating import SimulateSettings, simulate
from semel.lab.cli.testing import testing

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add them to the `semel` command; `semel.cli.app` finds this function by its entry point."""
    command(app, VerifySettings, engine_flags=True)(verify)
    command(app, ProveSettings, engine_flags=True)(prove)
    command(app, SimulateSettings)(simulate)
    app.add_typer(testing, name="testing")
    app.add_typer(bench, name="bench")


def verify(call: Call[VerifySettings]) -> None:
    """Prove that semel serves a model as bare vLLM does on this machine: answers, counters, speed; one report.

    Both servers are started here with the same flags of vLLM's, or run already. Exits with 1 if a part fails.
    """
    from semel.lab.cli.verifying import run_verify

    raise typer.Exit(run_verify(call.settings, list(call.rest)))


def prove(call: Call[ProveSettings]) -> None:
    """Run a fleet under fire on this machine: kills, cut links, dying stores; each answer is compared with bare vLLM's.

    Frontends, workers and stores are started here, and requests of four tenants are sent. Exits with 1 if a valid
    request failed or a token differed.
    """
    from semel.lab.cli.proving import run_prove

    raise typer.Exit(run_prove(call.settings, list(call.rest)))
