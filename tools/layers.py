"""The layers of semel, from the bottom up, and the graph of its imports.

`python -m tools.layers` writes the table into the pages that show it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import semel

SOURCE: Final = Path(semel.__file__).parent
ROOT: Final = Path(__file__).parent.parent

LAYERS: Final[Mapping[str, str]] = {
    "errors": "the exceptions, drawn as a tree",
    "aio": "long work on an event loop, in slices",
    "core": "values without I/O: digest, media, feature, prompt, contract, submission",
    "fairness": "shares of tenants in what they all use: bytes, places, time",
    "telemetry": "every metric in one table, logs, spans",
    "web": "HTTP parts that a frontend and a worker's admin address share",
    "encoder": "pure: which encoder outputs stay cached, what to encode in a step",
    "cache": "feature caches: in process, in shared memory, none",
    "ledger": "pure: what each worker has, announced and replayed",
    "media": "fetching under a policy, decoding under limits",
    "wire": "messages, frames, sessions without I/O, and the sockets under them",
    "interchange": "formats of files and HTTP bodies: safetensors, vLLM's items",
    "store": "the media store: uploaded files, by content and tenant, on a disk or in a bucket",
    "embeddings": "the fleet's store of encoder outputs: names, seals, a small RESP client",
    "client": "`semel.contract` and `semel.inject`, for outside frameworks",
    "openai": "`semel.openai`: an HTTP client for the `openai` and `anthropic` packages that sends media once",
    "batch": "`semel batch`: the lines of OpenAI's batch files, their order, their results",
    "processing": "features through HF processors, fingerprints, families; the pool of processes",
    "render": "chat template, tokens, placeholders; the pipeline",
    "engine": "the `Engine` protocol; `engine/vllm` holds all contact with vLLM",
    "fleet": "workers: discovery, membership, the choice of one, retries; serves no HTTP",
    "cells": "several fleets behind one balancer: which cell a tenant is in, Envoy's and HAProxy's configuration",
    "frontend": "the OpenAI-compatible server",
    "worker": "the server around an engine",
    "settings": "what comes from files and the environment",
    "key_files": "the keys of a process, read from files and read again when they are rotated",
    "sizing": "how much memory a host needs",
    "shutdown": "how a process learns that it should end",
    "compose": "puts the parts together into processes",
    "vllm_plugin": "semel inside plain vLLM: `SEMEL=1 vllm serve`",
    "cli": "the `semel` command",
    "lab": "the workshop: benchmarks, the proof against bare vLLM, the simulator, tiny models",
    "__main__": "`python -m semel`",
}
"""What lives in each. A layer may import itself and what stands before it."""

PAGES: Final = ("CONTRIBUTING.md", "docs/internals/design.md")
BEGIN, END = "<!-- layers: python -m tools.layers -->\n", "<!-- /layers -->\n"


@cache
def modules() -> Mapping[str, Path]:
    """Return every module of semel by its full name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


@cache
def nodes_of(module: str) -> Sequence[ast.AST]:
    return tuple(ast.walk(tree_of(module)))


@cache
def imports_of(module: str) -> frozenset[str]:
    """Return a module's imports, anywhere in it: a module where one is named, else the module that has the name."""
    found = set[str]()
    for node in nodes_of(module):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; write the full name"
            names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules() else node.module or "" for name in names.values()}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


def layer_of(module: str) -> str:
    return module.removeprefix("semel.").partition(".")[0]


def table() -> str:
    rows = "".join(f"| `{name}` | {content} |\n" for name, content in LAYERS.items())
    return f"{BEGIN}| layer | what lives there |\n|---|---|\n{rows}{END}"


def with_table(page: str) -> str:
    """Return the text of a page with the table as it should be."""
    before, _, rest = page.partition(BEGIN)
    return before + table() + rest.partition(END)[2]


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(with_table(path.read_text()))
