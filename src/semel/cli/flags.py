"""Commands from settings: what a command takes is read off the settings section that it fills."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import IO, Annotated, Any, Final, Generic, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from semel.cli.checks.finding import Finding
from semel.cli.command_line import CommandLine
from semel.cli.error_line import print_error
from semel.cli.help import command_help, group_help, matching, usage_of
from semel.core.flag import Flag, arguments_of, fill, flags_of
from semel.errors import ConfigError

__all__ = ["Call", "FlagCommand", "HelpGroup", "command", "version_line"]

_ENGINE: Final = "engine"
_FINDINGS: Final = "semel.findings"
_PASS_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True}

_UsageError: Final[Any] = typer.BadParameter.__mro__[1]  # typer has no other name for it

_S = TypeVar("_S")


@dataclass(frozen=True, slots=True)
class Call(Generic[_S]):
    """One call of a command."""

    settings: _S
    values: Mapping[str, Any]
    """Of its flags, by their keys, as they were written: in the flags' own units."""

    rest: Sequence[str] = ()
    """vLLM's flags."""

    findings: Sequence[Finding] = ()
    """Of flags of vLLM's server."""

    def arguments(self, section: type, *, but: Collection[str] = ()) -> list[str]:
        """Return the values of flags that a section has too, `but` for some, as they stand on a command line."""
        return arguments_of(tuple(one for one in flags_of(section) if one.key not in but), self.values)


class FlagCommand(TyperCommand):
    """A command whose help is made from its flags."""

    flags: tuple[Flag, ...] = ()
    engine_flags: bool = False
    server_flags: bool = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the command line apart; help about a topic is shown at once."""
        topic = next((word.partition("=")[2] for word in args if word.startswith("--help=")), "")
        if topic:
            typer.echo(self._help(ctx, topic))
            raise typer.Exit
        written = args
        if self.server_flags or any(one.is_list and not one.is_positional for one in self.flags):
            args = self._expand(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            message = _one_line(error)
            lists = {one.spelling for one in self.flags if one.is_list and not one.is_positional}
            if message.startswith("missing argument") and (taker := next((w for w in written if w in lists), None)):
                message = f"{message.rstrip('.')}: what follows {taker} are its values, so write it before that flag"
            raise _FlagError(message, ctx=ctx) from None

    def _expand(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite what a user of vLLM writes as flags that this command has."""
        line = CommandLine(self.flags, self.engine_flags, self.server_flags)
        try:
            line.read(args)
        except ConfigError as error:
            raise _FlagError(str(error), ctx=ctx) from None
        ctx.meta[_FINDINGS] = tuple(line.findings)
        return line.words

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002 typer's
        """Return what follows the name of the command, for errors."""
        return usage_of(self.flags, engine_flags=self.engine_flags)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write(self._help(ctx))

    def _help(self, ctx: Any, topic: str = "") -> str:
        if topic == _ENGINE:
            if not self.engine_flags:
                raise _FlagError("this command takes no flags of vLLM's engine; its worker does", ctx=ctx)
            return _engine_help()
        is_search = topic not in ("", "all")
        others = _engine_flags(topic) if self.engine_flags and is_search else ()
        if is_search and not others and not matching(self.flags, topic):
            raise _FlagError(f"no flag has {topic!r} in its name or help; --help=all shows all", ctx=ctx)
        purpose = inspect.cleandoc(self.help or "")
        return command_help(
            ctx.command_path, purpose, self.flags, engine_flags=self.engine_flags, topic=topic, others=others
        )


class HelpGroup(TyperGroup):
    """A command that has commands of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the command line apart; the version is shown at once."""
        if args[:1] == ["--version"] and ctx.parent is None:
            typer.echo(version_line())
            raise typer.Exit
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            if not args:
                raise  # shows the help
            raise _FlagError(_one_line(error), ctx=ctx) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that is called."""
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            raise _FlagError(_one_line(error), ctx=ctx) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        listed = [(name, _purpose(self.commands[name])) for name in self.list_commands(ctx)]
        formatter.write(group_help(ctx.command_path, inspect.cleandoc(self.help or ""), listed))


class _FlagError(typer.BadParameter):
    """A flag, a value or a command that there is not: one line."""

    def show(self, file: IO[Any] | None = None) -> None:  # noqa: ARG002 typer's
        """Print it."""
        print_error(self.message, self.ctx.command_path if self.ctx is not None else "semel")


def _one_line(error: Any) -> str:
    """Return what typer says of a command line, in one line."""
    message = " ".join(error.format_message().split())
    return message[:1].lower() + message[1:] if message.startswith(("Missing", "No such", "Option")) else message


def command(
    app: typer.Typer,
    settings: type[_S],
    name: str | None = None,
    *,
    engine_flags: bool = False,
    server_flags: bool = False,
) -> Callable[[Callable[[Call[_S]], None]], Callable[[Call[_S]], None]]:
    """Make a function a command that takes the flags of a settings section.

    `engine_flags`: it takes those of vLLM's engine too; `server_flags`: it knows those of vLLM's server.
    """
    flags = flags_of(settings)

    def decorate(run: Callable[[Call[_S]], None]) -> Callable[[Call[_S]], None]:
        def called(context: typer.Context, **texts: Any) -> None:
            values = {one.key: _value(one, texts[one.key], context) for one in flags}
            findings = context.meta.get(_FINDINGS, ())
            run(Call(fill(settings, values), values, tuple(context.args), findings))

        parameters = [_parameter(one) for one in flags]
        own = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        called.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in (own, *parameters)}
        called.__doc__ = run.__doc__
        kind = type(
            "Command", (FlagCommand,), {"flags": flags, "engine_flags": engine_flags, "server_flags": server_flags}
        )
        passed_on = _PASS_ON if engine_flags else None
        app.command(name or run.__name__, cls=kind, context_settings=passed_on)(called)
        return run

    return decorate


def _parameter(one: Flag) -> inspect.Parameter:
    """Describe the flag to typer, which only takes command lines apart: values are the flag's own business."""
    kind: Any = bool if one.kind is bool else list[str] if one.is_list else str
    default: Any = inspect.Parameter.empty if one.is_required else False if one.kind is bool else None
    info = (
        typer.Argument(metavar=one.spelling, help=one.help)
        if one.is_positional
        else typer.Option(one.spelling, metavar=one.placeholder or None, help=one.help)
    )
    optional = kind if one.is_required or one.kind is bool else kind | None
    return inspect.Parameter(
        one.key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[optional, info]
    )


def _value(one: Flag, text: Any, context: typer.Context) -> Any:
    if one.kind is bool:
        return bool(text)
    if text is None or text == []:
        return one.default
    try:
        return tuple(map(one.parse, text)) if one.is_list else one.parse(text)
    except ValueError as error:
        raise _FlagError(str(error), ctx=context) from None


def version_line() -> str:
    """Return the installed version, as `semel --version` shows it."""
    return f"semel {version('semel')}"


def _purpose(found: Any) -> str:
    """Return the first sentence of what a command says of itself."""
    sentence = " ".join(inspect.cleandoc(found.help or "").split()).partition(". ")[0]
    return sentence if sentence.endswith(".") else f"{sentence}."


def _engine_flags(word: str) -> list[str]:
    """Find vLLM's engine flags that have a word in their names."""
    from semel.engine.vllm.compat.flags import FlagSource

    source = FlagSource.installed()
    return [] if source is None else [one for one in source.spellings if word.lower().replace("_", "-") in one]


def _engine_help() -> str:
    try:
        from semel.engine.vllm.arguments import engine_help

        return engine_help()
    except ImportError:
        raise ConfigError(
            "vLLM is not installed here, so its flags cannot be listed; see `vllm serve --help`"
        ) from None
