"""The content format of a chat template: a list of parts ("openai") or one string ("string").

A template that loops over the content of a message needs parts. Templates do not declare this, so it is derived from
their syntax tree. The result equals vLLM's, because clients see the difference: with parts, an image stays where the
client put it; with a string, all images of a message come before its text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

__all__ = ["ContentFormat", "content_format"]

ContentFormat = Literal["openai", "string"]


class _Undecided(Exception):
    """The tree has a construct that the rules do not cover, such as a loop that unpacks a tuple."""


def content_format(tree: nodes.Template) -> ContentFormat:
    """Return the format of a parsed template; "string" if it cannot be determined."""
    try:
        return "openai" if _loops_over_content(tree) else "string"
    except _Undecided:
        return "string"


def _loops_over_content(tree: nodes.Template) -> bool:
    messages = _message_names(tree)
    parameters = _content_parameters(tree, messages)
    in_macro = {id(loop) for macro in tree.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    for loop in tree.find_all(nodes.For):
        subject = loop.iter
        named = subject.name if isinstance(subject, nodes.Name) else None
        if (
            any(_reads_content(subject, message) for message in messages)
            or named in parameters.get(id(loop), ())
            or (named == "content" and id(loop) not in in_macro)
        ):
            _target(loop)
            return True
    return False


def _message_names(tree: nodes.Template) -> set[str]:
    """Return the names of one message in the template: the variables of its loops over `messages`."""
    lists = _list_names(tree)
    return {_target(loop) for loop in tree.find_all(nodes.For) if any(_reads(loop.iter, name) for name in lists)}


def _list_names(tree: nodes.Template) -> set[str]:
    """`messages`, and every variable that it, or a slice or filtering of it, is assigned to."""
    names = {"messages"}
    pending = ["messages"]
    while pending:
        name = pending.pop()
        aliases = {_target(assign) for assign in tree.find_all(nodes.Assign) if _reads(assign.node, name)}
        pending += aliases - names
        names |= aliases
    return names


def _content_parameters(tree: nodes.Template, messages: set[str]) -> dict[int, set[str]]:
    """By the identity of each loop inside a macro: the macro's parameters that receive a message's content."""
    by_loop: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        parameters = {
            parameter
            for call in tree.find_all(nodes.Call)
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name
            for parameter, argument in _bind(macro, call)
            if any(_reads_content(argument, message) for message in messages)
        }
        if parameters:
            by_loop.update((id(loop), parameters) for loop in macro.find_all(nodes.For))
    return by_loop


def _bind(macro: nodes.Macro, call: nodes.Call) -> Iterator[tuple[str, nodes.Expr]]:
    names = [parameter.name for parameter in macro.args]
    yield from zip(names, call.args, strict=False)
    yield from ((keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names)


def _reads(expression: nodes.Node, name: str) -> bool:
    return _is_name(_stripped(expression), name)


def _reads_content(expression: nodes.Node, message: str) -> bool:
    subject = _stripped(expression)
    if isinstance(subject, nodes.Getattr):
        return subject.attr == "content" and _is_name(subject.node, message)
    if isinstance(subject, nodes.Getitem):
        key = subject.arg
        return isinstance(key, nodes.Const) and key.value == "content" and _is_name(subject.node, message)
    return False


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _stripped(expression: nodes.Node) -> nodes.Node:
    """Return the expression without the filters, tests and slices around it."""
    match expression:
        case nodes.Filter(node=nodes.Expr() as inner) | nodes.Test(node=inner):
            return _stripped(inner)
        case nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _stripped(inner)
    return expression


def _target(statement: nodes.Assign | nodes.For) -> str:
    if not isinstance(statement.target, nodes.Name):
        raise _Undecided
    return statement.target.name
