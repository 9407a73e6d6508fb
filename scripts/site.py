"""The pages of the documentation site that are not in `docs/`: generated from the code, or in the repository's root.

A hook of MkDocs. `reference/*` is read out of the code when the site is built, so it cannot drift; the README is the
site's front page, so there is one quick start. A link that leaves `docs/` is not a page of the site: its text stays.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from semel import errors
from semel.cli.app import app
from semel.cli.help import usage_of
from semel.core.flag import GROUPS, Flag
from semel.telemetry.metrics import METRICS
from semel.wire import messages

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
TAGGED = re.compile(r"<(?=[a-z])")
FLAG = re.compile(r"<code>(--[a-z0-9-]{1,28})</code>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not written under `docs/`."""
    for path, content in pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Keep the text of links that leave `docs/`, and drop the link."""
    folder = Path(page.file.src_uri).parent

    def resolve(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path = target.partition("#")[0]
        if "://" in target or not path or mark:
            return match.group()
        inside = Path("/") / folder / path
        return match.group() if files.get_file_from_path(_normal(inside)) else text

    return LINK.sub(resolve, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Mark flags, so that a narrow cell does not break them at a hyphen."""
    return FLAG.sub(r'<code class="flag">\1</code>', html)


def pages() -> dict[str, str]:
    """The generated pages, by their paths in the site."""
    return {
        "index.md": _of_the_root("README.md"),
        "contributing.md": _of_the_root("CONTRIBUTING.md"),
        "changes.md": _of_the_root("CHANGELOG.md"),
        "conduct.md": _of_the_root("CODE_OF_CONDUCT.md"),
        "reporting.md": _of_the_root("SECURITY.md"),
        "roadmap.md": _of_the_root("ROADMAP.md"),
        "examples.md": (ROOT / "examples/README.md").read_text().replace("../docs/", ""),
        "reference/commands.md": "\n".join(commands()),
        "reference/metrics.md": "\n".join(metrics()),
        "reference/errors.md": "\n".join(error_kinds()),
        "reference/messages.md": "\n".join(wire_messages()),
    }


def commands() -> Iterator[str]:
    """Every command and its flags, from their declarations."""
    yield "# Commands and settings\nEvery setting is a flag. This page and `--help` have the same source."
    yield "A size is a number of bytes, or a number with a unit: `256MiB`, `4G` (powers of 1024).\n"
    for name, command in _commands("semel", typer.main.get_command(app)):
        yield f"## {name}\n{inspect.cleandoc(command.help or '')}\n"
        yield f"`{' '.join([name, *usage_of(command.flags, engine_flags=command.engine_flags)])}`\n"
        for group in GROUPS:
            yield from _flag_table(group, [one for one in command.flags if one.group == group])
        if command.engine_flags:
            yield f"vLLM's engine flags are taken too, under their own names; `{name} --help=engine` lists them.\n"


def metrics() -> Iterator[str]:
    """The table of all metrics."""
    yield "# Metrics\nMade from the table that every metric is recorded through (`semel.telemetry.metrics`).\n"
    yield "| metric | kind | labels | meaning |\n|---|---|---|---|"
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        yield f"| `{metric.name}` | {metric.kind} | {labels} | {_cell(metric.help)} |"


def error_kinds() -> Iterator[str]:
    """The table of errors that a client may get."""
    yield "# Errors\nWhat a client may get, in OpenAI's shape: `error.code` says what it is."
    yield "Made from `semel.errors`.\n"
    yield "| status | code | meaning |\n|---|---|---|"
    kinds = sorted(_kinds(errors.SemelError), key=lambda kind: (kind.status, kind.code))
    for kind in kinds:
        yield f"| {kind.status} | `{kind.code}` | {_first_line(kind)} |"
    yield "\nThe whole tree, for programs that import semel:\n\n```"
    yield inspect.cleandoc((errors.__doc__ or "").partition("::\n")[2].partition("\nA message")[0])
    yield "```"


def wire_messages() -> Iterator[str]:
    """The messages between frontends and workers, field by field."""
    yield "# Messages\nBetween frontends and workers, field by field, in the order in which they travel. Made from"
    yield "`semel.wire.messages`; [the protocol](../internals/protocol.md) says when each may be said.\n"
    found = [kind for _, kind in inspect.getmembers(messages, inspect.isclass) if _is_message(kind)]
    for kind in sorted(found, key=lambda kind: (_tag(kind) is None, _tag(kind) or 0, kind.__name__)):
        tag = _tag(kind)
        yield f"## {kind.__name__}" + (f" ({tag})" if tag is not None else "")
        yield f"{_first_line(kind)}\n"
        fields = msgspec.structs.fields(kind)
        if fields:
            yield "| field | type |\n|---|---|"
        for field in fields:
            yield f"| `{field.name}` | `{_type_name(field.type)}` |"
        yield ""


def _of_the_root(name: str) -> str:
    """A page of the repository's root, with links as they are from `docs/`."""
    moved = {
        "CHANGELOG.md": "changes.md",
        "CODE_OF_CONDUCT.md": "conduct.md",
        "CONTRIBUTING.md": "contributing.md",
        "ROADMAP.md": "roadmap.md",
        "SECURITY.md": "reporting.md",
        "examples/README.md": "examples.md",
    }
    text = (ROOT / name).read_text().replace("](docs/", "](")
    for old, new in moved.items():
        text = text.replace(f"]({old})", f"]({new})")
    return text


def _normal(path: Path) -> str:
    parts: list[str] = []
    for part in path.parts[1:]:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for child, found in command.commands.items():  # in the order of `semel --help`
            yield from _commands(f"{name} {child}", found)
    elif not command.hidden:
        yield name, command


def _flag_table(group: str, flags: Sequence[Flag]) -> Iterator[str]:
    if flags:
        yield f"**{group}**\n\n| flag | type | default | meaning |\n|---|---|---|---|"
    for one in flags:
        kind = ", ".join(filter(None, (_flag_type(one), one.bounds)))
        yield f"| `{one.spelling}` | {kind} | {_default(one)} | {_cell(one.help)} |"
    if flags:
        yield ""


def _default(one: Flag) -> str:
    if one.is_required:
        return "required"
    return _cell(one.readable_default) or ("off" if one.kind is bool else "none")


def _kinds(kind: type[errors.SemelError]) -> Iterator[Any]:
    for child in kind.__subclasses__():
        if issubclass(child, errors.RequestError | errors.ServiceError) and child.__module__ == errors.__name__:
            yield child
        yield from _kinds(child)


def _is_message(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct) and kind.__module__ == messages.__name__


def _tag(kind: Any) -> int | None:
    tag = kind.__struct_config__.tag
    return tag if isinstance(tag, int) else None


def _flag_type(one: Flag) -> str:
    if one.choices:
        return " or ".join(f"`{choice}`" for choice in one.choices)
    if one.unit in ("bytes", "GiB", "seconds"):
        return {"bytes": "size", "GiB": "GiB", "seconds": "seconds"}[one.unit]
    name = {int: "integer", float: "number", Path: "path", bool: "switch"}.get(one.kind, "text")
    return f"{name}, several" if one.is_list and not one.is_positional else name


def _type_name(kind: Any) -> str:
    if inspect.isclass(kind):
        return kind.__name__
    shown = re.sub(r"(?:\w+\.)+(\w+)", r"\1", str(kind))
    plain = re.sub(r"Annotated\[([^,\[\]]+(?:\[[^\]]*\])?), Meta\([^)]*\)\]", r"\1", shown)
    return plain.replace("|", "or")


def _first_line(kind: Callable[..., Any] | type) -> str:
    return _cell(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0])


def _cell(text: str) -> str:
    """Text that cannot end a cell of a table, nor begin a tag."""
    return TAGGED.sub("&lt;", " ".join(text.split()).replace("|", "\\|"))
