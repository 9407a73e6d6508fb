"""Runs a Jinja template in a sandbox, with the features that transformers gives to chat templates (threats S15).

A template comes with the model or from the operator, never from a client; but clients choose its input. Errors that a
template raises on purpose go to the client; all its other errors stay in the log (S7).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn, Self

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2 import Template as CompiledTemplate
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from semel.errors import ConfigError, TemplateError
from semel.render.chat.content_format import ContentFormat, content_format
from semel.render.tokens.placeholder_escape import LETTERS

__all__ = ["Template"]

_MAX_REPEATED: Final = 1 << 20
_MAX_EXPONENT: Final = 64


@dataclass(frozen=True, slots=True, repr=False)
class Template:
    """One compiled Jinja template. Thread-safe."""

    text: str
    content_format: ContentFormat
    _compiled: CompiledTemplate

    @classmethod
    def compile(cls, text: str, *, origin: str) -> Self:
        """Compile `text`; `origin` names its source in errors."""
        environment = _environment()
        try:
            tree = environment.parse(text)
            return cls(text, content_format(tree), environment.from_string(tree))
        except TemplateSyntaxError as error:
            raise ConfigError(f"{origin}, line {error.lineno}: not a Jinja template: {error.message}") from error

    @property
    def names(self) -> frozenset[str]:
        """The names that the environment defines, which variables must not hide."""
        return frozenset(self._compiled.environment.globals)

    @property
    def knows_developer(self) -> bool:
        """Return whether the template mentions the role "developer"."""
        return '"developer"' in self.text or "'developer'" in self.text

    def render(self, variables: Mapping[str, object]) -> str:
        """Render the template with `variables`."""
        try:
            return self._compiled.render(variables)
        except TemplateError:
            raise
        except Exception as error:  # the template is foreign code: it can fail with anything
            raise TemplateError(
                f"the chat template cannot render these messages ({type(error).__name__}): "
                "check roles, their order and the types of content against the model's documentation"
            ) from error

    def __repr__(self) -> str:
        return f"Template({len(self.text):,} characters, {self.content_format})"


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox bounds loops but not products: `'a' * n` with a client's n would be a text of any size."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and abs(right) > _MAX_EXPONENT:
            raise SecurityError(f"an exponent is at most {_MAX_EXPONENT}")
        for operand, times in ((left, right), (right, left)):
            if isinstance(operand, Sized) and len(operand) * times > _MAX_REPEATED:
                raise SecurityError(f"what is repeated has at most {_MAX_REPEATED:,} elements")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; serving renders the text unchanged."""

    tags = {"generation"}  # noqa: RUF012 Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(f"the chat template refuses these messages: {message}")


def _strftime_now(format: str) -> str:  # noqa: A002 templates may pass it by this name
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _escaped(text) if ensure_ascii else text


def _escaped(text: str) -> str:
    """`text` in ASCII, except the letters of a guard, which must stay visible for the code that removes it."""
    return re.sub(rf"[^\x00-\x7e{LETTERS[0]}-{LETTERS[-1]}]", lambda found: json.dumps(found[0])[1:-1], text)
