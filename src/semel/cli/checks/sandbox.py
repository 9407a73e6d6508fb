"""The check of this kernel for the sandbox of preprocessing processes."""

from __future__ import annotations

from semel.cli.checks.finding import Finding
from semel.processing.sandbox import Sandbox, kernel_sandbox

__all__ = ["check_sandbox"]

_REMEDY = (
    "decoders run with the rights of the frontend's user; use Linux 5.13 or later with Landlock switched on, and a "
    "container profile that allows its calls"
)


def check_sandbox(*, required: bool = False, found: Sandbox | None = None) -> Finding:
    """Check the layers: a missing one is a problem where the sandbox is required, and a warning elsewhere."""
    sandbox = found or kernel_sandbox()
    if sandbox.is_whole:
        return Finding("sandbox", "ok", str(sandbox))
    detail = f"{'--require-sandbox: ' if required else ''}{sandbox}"
    return Finding("sandbox", "problem" if required else "warning", detail, _REMEDY)
