"""The costs of a simulated fleet, in seconds: guesses (`MODELLED`), or read from `semel bench serve --json`.

Only the costs of preprocessing, encoding and generating differ much between machines. Counts of encodes, hits and bytes
hardly depend on any of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from semel.errors import ConfigError
from semel.lab.simulate.workload import Item

__all__ = ["MODELLED", "Costs"]

_PIXELS: Final = 1024 * 1024
_TOKENS: Final = 1_369
"""Of the image that `semel bench serve` calls 1024."""

_HD_TOKENS: Final = 2_691


@dataclass(frozen=True)
class Costs:
    """The seconds that a frontend, a network and an engine take for each thing."""

    pixel_s: float = 33e-9
    """Of decoding and preprocessing, for each pixel of an image."""

    digest_s: float = 0.3e-3
    """Of one item."""

    parse_s: float = 0.3e-3
    render_s: float = 0.7e-3
    send_s: float = 0.3e-3
    """Of one request, each."""

    encode_token_s: float = 30e-3 / _TOKENS
    """Of the encoder, for each token of an image."""

    prefill_token_s: float = 50e-6
    step_base_s: float = 18e-3
    """Of a step of the engine, whatever its batch."""

    step_request_s: float = 0.2e-3
    """Of a step, for each request in it."""

    latency_s: float = 0.2e-3
    """From one host to another."""

    bandwidth: float = 790e6
    """Bytes a second of one link."""

    def process_s(self, item: Item) -> float:
        """Decoding and preprocessing."""
        return self.pixel_s * item.width * item.height

    def encode_s(self, tokens: int) -> float:
        """Return the encoder's time over so many tokens."""
        return self.encode_token_s * tokens

    def prefill_s(self, tokens: int) -> float:
        """Return the language model's time over so many tokens of a prompt."""
        return self.prefill_token_s * tokens

    def step_s(self, batch: int) -> float:
        """Return the time of one token for each of so many requests."""
        return self.step_base_s + self.step_request_s * batch

    def transfer_s(self, nbytes: int) -> float:
        """From one host to another."""
        return self.latency_s + nbytes / self.bandwidth

    @classmethod
    def of_bench(cls, path: Path) -> Self:
        """Costs from a report of `semel bench serve --json`; what it has no figure for is as modelled."""
        try:
            report = json.loads(path.read_text())
            rows = {row["name"]: float(row["semel"]["value"]) * 1e-3 for row in report["rows"] if row["unit"] == "ms"}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--costs {path} is no report of `semel bench serve --json`: {error}") from error
        costs = cls()
        changes: dict[str, Any] = {}
        for name in ("parse", "digest", "render", "send"):
            if (seconds := rows.get(f"again: 1024, stage {name}, mean")) is not None:
                changes[f"{name}_s"] = seconds
        if (seconds := rows.get("render: 16 new images at a time with tensors, per image")) is not None:
            changes["pixel_s"] = seconds / _PIXELS
        new, again = rows.get("new: 1024, latency"), rows.get("again: 1024, latency")
        if new is not None and again is not None:
            processing_s = changes.get("pixel_s", costs.pixel_s) * _PIXELS
            changes["encode_token_s"] = max(0.0, new - again - processing_s) / _TOKENS
        small, large = rows.get("again: 1024, what the image adds"), rows.get("again: HD, what the image adds")
        if small is not None and large is not None:
            changes["prefill_token_s"] = max(0.0, large - small) / (_HD_TOKENS - _TOKENS)
        if (seconds := rows.get("again: 1024, stage first_token, mean")) is not None:
            changes |= {"step_base_s": seconds, "step_request_s": seconds / 100}
        return replace(costs, **changes)


MODELLED: Final = Costs()
"""Guesses: a model of 7 billion parameters on one GPU, and this project's own frontend."""
