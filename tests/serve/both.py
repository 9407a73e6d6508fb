"""`semel serve` and bare vLLM's server over the same model, and one unmodified `openai` client of each.

What is asked of both is compared field by field, but for what stands in `differences`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from semel.lab.bench.ports import free_port
from semel.settings.secrets import create_key
from tests.serve.bare import bare_starting, until_healthy
from tests.serve.differences import comparable, joined
from tests.serve.served import Served, serving

__all__ = ["HELLO", "MODEL", "Both", "asked_of", "serving_both"]

MODEL: Final = "tiny"
HELLO: Final = [{"role": "user", "content": "Hello there"}]


@dataclass(frozen=True)
class Both:
    """One client of each server."""

    served: Served
    ours: openai.OpenAI
    bare: openai.OpenAI
    model: Path
    fleet_key: Path
    admin_key: Path
    admin_url: str
    """Of semel's worker; bare vLLM has nothing like it."""

    bare_url: str

    def chat(self, *, cached: bool = True, **fields: Any) -> Any:
        """Ask both for a whole answer, compare, and give ours."""
        asked = asked_of(fields)
        mine, theirs = (client.chat.completions.create(**asked) for client in (self.ours, self.bare))
        _compare(mine.model_dump(), theirs.model_dump(), cached=cached)
        return mine

    def stream(self, **fields: Any) -> dict[str, Any]:
        """Ask both for a stream, compare what it says, and give ours, joined."""
        asked = {**asked_of(fields), "stream": True}
        mine, theirs = (list(client.chat.completions.create(**asked)) for client in (self.ours, self.bare))
        return _compare_streams(mine, theirs)

    def complete(self, *, cached: bool = True, **fields: Any) -> Any:
        asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6, **fields}
        mine, theirs = (client.completions.create(**asked) for client in (self.ours, self.bare))
        if asked.get("stream"):
            return _compare_streams(list(mine), list(theirs))
        _compare(mine.model_dump(), theirs.model_dump(), cached=cached)
        return mine

    def refuse(self, **fields: Any) -> openai.APIStatusError:
        """Both refuse with the same exception; ours."""
        errors = []
        for client in (self.ours, self.bare):
            with pytest.raises(openai.APIStatusError) as caught:
                client.chat.completions.create(**asked_of(fields))
            errors.append(caught.value)
        mine, theirs = errors
        assert (type(mine), mine.status_code) == (type(theirs), theirs.status_code), (str(mine), str(theirs))
        return mine


def asked_of(fields: dict[str, Any]) -> dict[str, Any]:
    """A chat with these fields, and brief where they leave it open."""
    return {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 6, **fields}


def _compare(mine: dict[str, Any], theirs: dict[str, Any], *, cached: bool) -> None:
    assert comparable(mine, cached=cached) == comparable(theirs, cached=cached)


def _compare_streams(mine: list[Any], theirs: list[Any]) -> dict[str, Any]:
    ours, bare = (joined([chunk.model_dump() for chunk in chunks]) for chunks in (mine, theirs))
    for one in (ours, bare):
        assert (one["usage"] is None) or one["usage"].pop("prompt_tokens_details") is not None
    assert ours == bare
    return ours


@contextmanager
def serving_both(folder: Path, home: Path, *flags: str, only_ours: Sequence[str] = ()) -> Iterator[Both]:
    """Both servers with the same flags, until the end; ours with keys that are known, and an admin address.

    `only_ours` are flags of what vLLM does not have.
    """
    flags = ("--served-model-name", MODEL, *flags)
    fleet_key, admin_key, admin_port = home / "fleet.key", home / "admin.key", free_port()
    for path in (fleet_key, admin_key):
        create_key(path)
    keys = ("--fleet-key-file", str(fleet_key), "--admin-port", str(admin_port), "--admin-key-file", str(admin_key))
    with (
        bare_starting(folder, home, *flags, "--enable-prompt-tokens-details") as (url, process),
        serving(folder, home, *flags, *keys, *only_ours, within_s=400) as served,
    ):
        until_healthy(url, process, 240)
        options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}
        with (
            openai.OpenAI(base_url=f"{served.url}/v1", **options) as ours,
            openai.OpenAI(base_url=f"{url}/v1", **options) as bare,
        ):
            yield Both(served, ours, bare, folder, fleet_key, admin_key, f"http://127.0.0.1:{admin_port}", url)
