"""Typical mistakes at a start: what each is, how to make it, and by which words one knows that the cause was said."""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from semel.lab.bench.ports import free_port

BIN: Final = Path(sys.executable).parent
Side = Literal["semel", "vllm"]
COMMANDS: Final[Mapping[Side, Sequence[str]]] = {
    "semel": (str(BIN / "semel"), "serve"),
    "vllm": (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"),
}
"""The second is what `vllm serve` runs; the command itself does not start from the package for CPUs."""

Change = Callable[[Path], object]


@dataclass(frozen=True)
class Mistake:
    """One mistake."""

    name: str
    cause: str
    """What a line has that tells the cause, as a regular expression."""

    check: str = "check_model"
    """The check that finds it, by its name in `semel.cli.checks.start`."""

    flags: Sequence[str] = ()
    model: str | None = None
    """Instead of a folder with a tiny model."""

    change: Change | None = None
    """What is done to the folder."""

    environment: Mapping[str, str] = field(default_factory=lambda: {"VLLM_CPU_KVCACHE_SPACE": "1"})
    is_port_taken: bool = False


@dataclass(frozen=True)
class Said:
    """What a command said."""

    lines: Sequence[str]
    seconds: float
    code: int | None
    """None if it ran: it served, or did not end in time."""

    @property
    def first_line(self) -> str:
        return self.lines[0] if self.lines else ""

    def cause_line(self, mistake: Mistake) -> int:
        """The number of the line with the cause, from 1; 0 if there is none."""
        return next((number for number, line in enumerate(self.lines, 1) if re.search(mistake.cause, line)), 0)


def _config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _text_config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["text_config"] |= changes
        path.write_text(json.dumps(config))

    return change


def _remove(*patterns: str) -> Change:
    def change(folder: Path) -> None:
        for path in [path for pattern in patterns for path in folder.glob(pattern)]:
            path.unlink()

    return change


def _cut(name: str, share: float) -> Change:
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def _point_to_lfs(folder: Path) -> None:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4418050848\n"
    (folder / "model.safetensors").write_text(text)


MISTAKES: Final = (
    Mistake("a typo in a flag of the engine", r"--max-modle-len", "read_engine_flags", ["--max-modle-len", "4096"]),
    Mistake("a typo in `--port`", r"--prot\b", "read_engine_flags", ["--prot", "8001"]),
    Mistake("a comma in a number", r"max-model-len.*8,192", "read_engine_flags", ["--max-model-len", "8,192"]),
    Mistake(
        "a percentage where a share is meant",
        r"gpu.memory.utilization.*(at most|less than or equal to) 1|less than or equal to 1",
        "read_engine_flags",
        ["--gpu-memory-utilization", "92"],
    ),
    Mistake("a dtype by another name", r"--dtype.*fp16", "read_engine_flags", ["--dtype", "fp16"]),
    Mistake(
        "the old form of a limit",
        r"--limit-mm-per-prompt.*(JSON|json|image=2)",
        "read_engine_flags",
        ["--limit-mm-per-prompt", "image=2"],
    ),
    Mistake(
        "a parser of tool calls that does not exist",
        r"(tool-call-parser|tool call parser).*qwen\b",
        "read_engine_flags",
        ["--enable-auto-tool-choice", "--tool-call-parser", "qwen"],
    ),
    Mistake(
        "tools without a parser",
        r"--enable-auto-tool-choice.*--tool-call-parser",
        "read_engine_flags",
        ["--enable-auto-tool-choice"],
    ),
    Mistake(
        "a path that does not exist",
        r"neither a folder|Repo id must be|not a valid model identifier",
        model="/models/no-such-model",
    ),
    Mistake(
        "a model's name that is misspelt, offline",
        r"Qwen/Qwen2-VL-2B-Instrukt.*(HF_HUB_OFFLINE|cache)|HF_HUB_OFFLINE|outgoing traffic has been disabled",
        model="Qwen/Qwen2-VL-2B-Instrukt",
    ),
    Mistake("a folder that is no model", r"config\.json|not a model|no.*config", change=_remove("*")),
    Mistake("a `config.json` that is cut off", r"config\.json", change=_cut("config.json", 0.5)),
    Mistake(
        "a model that is newer than the libraries",
        r"model_type|model type|not recognize",
        change=_config(model_type="qwen9_vl", architectures=["Qwen9VLForConditionalGeneration"]),
    ),
    Mistake(
        "a model without its tokenizer",
        r"no tokenizer|[Cc]an't load|[Cc]ouldn't instantiate",
        change=_remove("tokenizer*", "vocab*"),
    ),
    Mistake("a folder without weights", r"(no|find any).*weights", change=_remove("*.safetensors")),
    Mistake("weights that are pointers of Git LFS", r"LFS|[Hh]eader", change=_point_to_lfs),
    Mistake(
        "weights that do not fit `config.json`",
        r"do not fit|AssertionError|size mismatch",
        change=_text_config(hidden_size=256),
    ),
    Mistake(
        "a longer context than the model has",
        r"max.model.len.*(131072|128k).*(65536|65,536)|more than the 65536",
        flags=["--max-model-len", "131072"],
    ),
    Mistake("a port that is taken", r"[Aa]ddress already in use", "check_ports", is_port_taken=True),
    Mistake(
        "less free memory than vLLM takes",
        r"99%|less than desired",
        "check_memory",
        ["--gpu-memory-utilization", "0.99"],
        environment={},
    ),
)


@contextmanager
def made(mistake: Mistake, tiny: Path, home: Path) -> Iterator[tuple[str, list[str]]]:
    """The model and the flags of a mistake; `tiny` is a folder with a model in which nothing is wrong."""
    folder = home / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tiny, folder)
    if mistake.change is not None:
        mistake.change(folder)
    port = free_port()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if mistake.is_port_taken:
            taken.bind(("127.0.0.1", port))
            taken.listen()
        yield mistake.model or str(folder), ["--host", "127.0.0.1", "--port", str(port), *mistake.flags]


def run(side: Side, mistake: Mistake, tiny: Path, home: Path, within_s: float) -> Said:
    """Make the mistake with one of the two commands, and see what it says."""
    with made(mistake, tiny, home) as (model, flags):
        url = f"http://127.0.0.1:{flags[3]}/health" if not mistake.is_port_taken else ""
        command = [*COMMANDS[side], model, *flags]
        usual = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
        return _run(command, usual | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200", **mistake.environment}, url, within_s)


def _run(command: Sequence[str], environment: Mapping[str, str], url: str, within_s: float) -> Said:
    began, printed = time.monotonic(), b""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, process_group=0
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while process.poll() is None and time.monotonic() - began < within_s and not _serves(url):
                if selector.select(0.1):
                    printed += process.stdout.read() or b""
                    time.sleep(0.01)
        seconds, code = time.monotonic() - began, process.poll()
        printed += process.stdout.read() or b""
    finally:
        _end(process)
        process.stdout.close()
    lines = [line.rstrip() for line in printed.decode(errors="replace").splitlines() if line.strip()]
    return Said(lines, seconds, code)


def _serves(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=0.2):
            return True
    except (OSError, ValueError, urllib.error.URLError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(15)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()
