"""Real, unmodified clients against semel and against bare vLLM: `scripts/clients`.

    scripts/clients                    # all of them; prints the table, ends with 1 if something differs
    scripts/clients openai litellm     # these
    scripts/clients --write            # all of them, and the table goes into docs/api/clients.md
    scripts/clients --servers URL URL FOLDER   # of semel and of vLLM, running already, and the model's folder

Each client has an environment of its own in a folder of the user's cache, made once by pip. Both servers run one tiny
model with the same flags. A driver in `scripts/client_drivers` makes the requests with the client's own Python.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from semel.lab.testing.models import build
from tests.serve.both import MODEL, serving_both
from tests.serve.speaking import speaking
from tools.client_comparison import Reply, Verdict, compare, read_replies
from tools.client_environments import CLIENTS, Client, python_of
from tools.client_page import Row, lines_of, replace_rows, wrong_lines

__all__ = ["DRIVERS", "ask", "rows_of"]

ROOT: Final = Path(__file__).parent.parent
DRIVERS: Final = ROOT / "scripts" / "client_drivers"
PAGE: Final = ROOT / "docs" / "api" / "clients.md"
_FLAGS: Final = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
_ASK_S: Final = 1_800.0


def main() -> None:
    """Ask with every client, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="clients; all by default")
    parser.add_argument("--write", action="store_true", help="write the table into docs/api/clients.md")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "semel" / "clients"
    parser.add_argument("--folder", type=Path, default=cache, help="for environments (%(default)s)")
    parser.add_argument("--prepare", action="store_true", help="make the environments, and no more")
    parser.add_argument("--servers", nargs=3, metavar=("SEMEL", "VLLM", "FOLDER"), help="ask these")
    options = parser.parse_args()
    chosen = [client for client in CLIENTS if not options.names or client.name in options.names]
    pythons = {client.name: _prepared(client, options.folder) for client in chosen}
    if options.prepare:
        return
    with _servers(options.servers) as servers:
        rows = [row for client in chosen for row in _rows(client, pythons[client.name], servers)]
    lines = lines_of(rows)
    _say("\n".join(lines))
    if wrong := wrong_lines(rows):
        _say("\nbare vLLM / semel:\n" + "\n".join(wrong))
    if options.write:
        PAGE.write_text(replace_rows(PAGE.read_text(), lines))
    sys.exit(bool(wrong))


def ask(python: Path, driver: str, url: str, folder: Path) -> list[Reply]:
    """Make the requests of a driver to a server."""
    command = [str(python), str(DRIVERS / f"ask_{driver}.py"), url, MODEL, str(folder)]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    found = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, env=environment)
    replies = read_replies(found.stdout)
    if found.returncode or not replies:
        raise RuntimeError(f"{driver} ended with {found.returncode}:\n{found.stderr[-2_000:]}")
    return replies


def rows_of(client: Client, mine: Sequence[Reply], theirs: Sequence[Reply]) -> list[Row]:
    """Return a row for each API that a client speaks."""
    bare = {(reply.api, reply.request): reply for reply in theirs}
    rows = []
    for api in dict.fromkeys(reply.api for reply in mine):
        ours = [reply for reply in mine if reply.api == api]
        alone = api in client.semel_only
        verdicts = {
            reply.request: _checked(reply) if alone else compare(client.name, reply, bare[api, reply.request])
            for reply in ours
        }
        rows.append(Row(client.name, _version(client), f"{api}, semel only" if alone else api, verdicts))
    return rows


def _checked(reply: Reply) -> Verdict:
    """Of what only semel has: every field of the answer says whether something holds."""
    if reply.error is not None:
        return Verdict(0, wrong=(reply.error,))
    wrong = tuple(name for name, holds in reply.answer.items() if holds is not True)
    return Verdict(len(reply.answer) - len(wrong), wrong=wrong)


@dataclass(frozen=True)
class _Servers:
    """Both servers, over one model."""

    urls: Mapping[str, str]
    folder: Path


@contextmanager
def _servers(running: Sequence[str] | None) -> Iterator[_Servers]:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory(prefix="clients-") as name:
        home = Path(name)
        if running is not None:
            yield _Servers({"semel": running[0], "vllm": running[1]}, Path(running[2]))
            return
        folder = speaking(build("qwen2-vl", home / "built"), home / "model")
        with serving_both(
            folder, home, *_FLAGS, only_ours=("--media-store", str(home / "media"), "--store-responses")
        ) as both:
            yield _Servers({"semel": both.served.url, "vllm": both.bare_url}, folder)


def _rows(client: Client, python: Path | str, servers: _Servers) -> list[Row]:
    if isinstance(python, str):
        return [Row(client.name, _version(client), "", note=python)]
    began = time.monotonic()
    try:
        mine, theirs = (ask(python, client.driver, servers.urls[side], servers.folder) for side in ("semel", "vllm"))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return [Row(client.name, _version(client), "", {"text": Verdict(0, wrong=(f"did not run: {error}",))})]
    _say(f"{client.name}: {len(mine)} requests of each server in {time.monotonic() - began:.0f} s")
    return rows_of(client, mine, theirs)


def _prepared(client: Client, folder: Path) -> Path | str:
    """Install its packages; return its Python, or why there is none."""
    try:
        return python_of(client, folder)
    except subprocess.SubprocessError as error:
        _say(f"{client.name} {client.version}: {error}")
        return "could not be installed"


def _version(client: Client) -> str:
    return client.version or f"vLLM {version('vllm-cpu')}"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
