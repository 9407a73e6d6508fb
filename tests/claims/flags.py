"""Flags that pages, examples, charts and images name are flags of the command before them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

import typer

from semel.cli.app import app as command_line
from semel.engine.vllm.compat.flags import FlagSource
from semel.engine.vllm.compat.server_flags import FORMER_FLAGS, SERVER_FLAGS
from tools.pages import ROOT, Pages, blank, code_lines

TOOLS: Final[Mapping[str, str]] = {
    "apt-get": "--yes --no-install-recommends",
    "cosign": "--certificate-identity --certificate-identity-regexp --certificate-oidc-issuer --type",
    "curl": "--fail --header --data --data-binary --silent --show-error --no-buffer --cacert --form --request",
    "docker": "--build --build-arg --device --env --file --gpus --ipc --mount --name --network --publish --rm"
    " --shm-size --tag --target --volume",
    "envoy": "--config-path --mode",
    "gh": "--repo",
    "helm": "--create-namespace --namespace --set --set-json --set-string --values --wait --install --reuse-values",
    "install": "--directory --mode --owner --group",
    "journalctl": "--unit --follow",
    "kubectl": "--dry-run --from-file --from-literal --namespace --for --timeout --selector --watch",
    "pip": "--constraint --extra-index-url --index-url --no-build-isolation --no-cache-dir --no-deps --no-index"
    " --only-binary --require-hashes --requirement --target --upgrade --wheel-dir",
    "pytest": "--durations --hypothesis-seed --log-cli-level --numprocesses --timeout",
    "systemctl": "--now",
    "useradd": "--system --home-dir --shell --create-home --gid --uid",
}
"""The flags of other programs that pages, examples, charts and images use, by the word that a command begins with."""

IN_FILES: Final[Mapping[str, str]] = {
    "*Containerfile": "--mount --from --platform --chown --chmod --interval --timeout --start-period --retries"
}
OF_VLLM_ONCE: Final = frozenset({"--no-enable-prefix-caching", "--model"})
SCANNED: Final = ("examples/*", "deploy/**/*", "containers/*file", "containers/*.yaml")
REFUSED: Final = re.compile("unknown flag|unrecognized arguments|did you mean")
"""Lines with it quote a refusal."""

_FLAG: Final = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_PROGRAM: Final = re.compile(
    rf"(?:^|[ `/])(scripts/[\w-]+|(?:tests|tools)\.[\w.]+|examples/\w+\.py|{'|'.join(TOOLS)})(?![\w-])"
)
HEAD: Final = re.compile(r"^(?:[$>#-] |[A-Z_]+=\S+ |sudo |exec |RUN (?:--\S+ )*|ExecStart\w*=)*(?:\S*/bin/)?")


@cache
def semel_flags() -> Mapping[str, frozenset[str]]:
    """The flags of each command."""

    def below(name: str, command: Any) -> Iterator[tuple[str, frozenset[str]]]:
        for child, found in getattr(command, "commands", {}).items():
            yield from below(f"{name} {child}", found)
        if not hasattr(command, "commands"):
            own = {one.spelling for one in command.flags} | {"--help"}
            yield (
                name,
                frozenset(
                    own | {f"--no-{flag[2:]}" for flag in own} | (vllm_flags() if command.engine_flags else set())
                ),
            )

    return dict(below("semel", typer.main.get_command(command_line)))


@cache
def vllm_flags() -> frozenset[str]:
    """The flags of vLLM's engine, read from its source, and of its server, as semel accounts for them."""
    engine = FlagSource.installed()
    assert engine is not None
    server = {spelling for row in (*SERVER_FLAGS, *FORMER_FLAGS) for spelling in row.spellings}
    return frozenset({*engine.spellings, *server, *OF_VLLM_ONCE})


def wrong_flags(pages: Pages) -> Iterator[str]:
    """Flags that the command before them has not; without a command, that neither semel nor vLLM has."""
    for page, text in pages.items():
        if page.endswith(".md"):
            lines = [*code_lines(text), *blank(text).splitlines()]
        else:
            lines = re.sub(r"\\\n\s*", " ", text).splitlines()
        more = {flag for pattern, flags in IN_FILES.items() if fnmatch.fnmatch(page, pattern) for flag in flags.split()}
        programs = {word for line in lines for word in _PROGRAM.findall(line)}
        everything = frozenset({"--help", "--version"}).union(
            vllm_flags(), *semel_flags().values(), *map(_flags_for, programs)
        )
        if page.endswith(".py"):
            more |= set(re.findall(r"add_argument\(\"(--[\w-]+)", text))
        for line in lines:
            if REFUSED.search(line):
                continue
            for part in map(str.strip, re.split(r"\|\||&&|[|;]|\$\([^)]*\)?", line)):
                known = _flags_for(part) or everything
                for flag in _FLAG.findall(part):
                    if flag not in known | more and not (
                        flag[-1] == "-" and any(one.startswith(flag) for one in known)
                    ):
                        yield f"{page}: {flag}: {part[:60]!r} has no such flag"


def _flags_for(part: str) -> frozenset[str]:
    """The flags of the program that a command begins with; none if it begins with no program that we know."""
    words = HEAD.sub("", part).split() or [""]
    if words[:2] == ["python", "-m"]:
        words = words[2:]
    elif words[0] in ("python", "python3"):
        words = words[1:] or words
    if words[0] == "semel":
        of_commands = semel_flags()
        for length in (3, 2):
            if (command := " ".join(words[:length])) in of_commands:
                return of_commands[command]
    if words[0] in TOOLS:
        return frozenset({*TOOLS[words[0]].split(), "--help", "--version"})
    if words[0].startswith(("scripts/", "tests.", "tools.", "examples/", "tests/")):
        return _flags_in_source(words[0])
    return vllm_flags() if words[0].startswith("vllm") else frozenset()


@cache
def _flags_in_source(name: str) -> frozenset[str]:
    """The flags that a program of this repository names, or the module that it hands over to."""
    path = name.replace(".", "/") if name.startswith(("tests.", "tools.")) else name
    found = [one for one in (ROOT / path, ROOT / f"{path}.py", ROOT / path / "__main__.py") if one.is_file()]
    text = "".join(one.read_text() for one in found)
    handed = [_flags_in_source(module) for module in re.findall(r"-m ((?:tests|tools)\.[\w.]+)", text) if path == name]
    return frozenset(_FLAG.findall(text)).union({"--help"}, *handed)
