"""Random conversations, how both agents' APIs write them, and what is said in them: a slow and plain model.

What is said is a list of facts. Both the client's request and the chat that it becomes are read into facts, by code
that shares nothing with the translation: equal facts mean that nothing was lost and nothing invented.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.frontend.agents import Answer

Fact = tuple[object, ...]

texts = st.text('aé \n"\\{<', min_size=1, max_size=6)
names = st.sampled_from(["look", "go", "f"])
arguments = st.dictionaries(st.text("ab", max_size=2), st.integers() | texts | st.none() | st.lists(st.booleans()))
images = st.integers(0, 99).map(lambda number: f"data:image/png;base64,{number:04}")


@dataclass(frozen=True)
class Call:
    """A call of a tool, and what came of it."""

    name: str
    arguments: Mapping[str, Any]
    result: Sequence[tuple[str, str]]
    """Texts and images, each with which of them it is."""


@dataclass(frozen=True)
class Turn:
    """What the user says and shows, and what the assistant thinks, says and calls."""

    said: Sequence[tuple[str, str]]
    reasoning: str
    answer: Sequence[str]
    calls: Sequence[Call]


parts = st.lists(st.tuples(st.just("text"), texts) | st.tuples(st.just("image"), images), min_size=1, max_size=3)
calls = st.builds(Call, names, arguments, parts)
turns = st.builds(Turn, parts, texts | st.just(""), st.lists(texts, max_size=2), st.lists(calls, max_size=2))
conversations = st.tuples(texts | st.just(""), st.lists(turns, min_size=1, max_size=3))
Talk = tuple[str, Sequence[Turn]]

whole_calls = st.builds(
    lambda number, name, value: {
        "id": f"call-{number}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(value)},
    },
    st.integers(0, 9),
    names,
    arguments,
)
answers = st.builds(
    Answer,
    texts | st.just(""),
    texts | st.just(""),
    st.lists(whole_calls, max_size=3).map(tuple),
    st.sampled_from(["stop", "length", "tool_calls"]),
    st.none() | st.integers(0, 9) | texts,
)


def facts(talk: Talk, *, results_show: bool) -> list[Fact]:
    """All that is said. With `results_show`, images in results are the tool's, otherwise the user's."""
    system, said = talk
    found: list[Fact] = [("system", system)] if system else []
    for number, turn in enumerate(said):
        found += [("user", *part) for part in turn.said]
        found += [("reasoning", turn.reasoning)] if turn.reasoning else []
        found += [("assistant", "".join(turn.answer))] if any(turn.answer) else []
        ids = [f"c{number}-{index}" for index in range(len(turn.calls))]
        found += [("call", one, call.name, dict(call.arguments)) for one, call in zip(ids, turn.calls, strict=True)]
        for one, call in zip(ids, turn.calls, strict=True):
            if results_show:
                found += [("result", one, *part) for part in call.result]
            else:
                found.append(("result", one, "text", "\n".join(text for kind, text in call.result if kind == "text")))
                found += [("user", *part) for part in call.result if part[0] == "image"]
    return found


def facts_of_chat(messages: Sequence[Mapping[str, Any]]) -> list[Fact]:
    """All that is said in a chat."""
    found: list[Fact] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        shown = [("text", content)] if isinstance(content, str) else [_shown(part) for part in content or ()]
        match role:
            case "system" | "user":
                found += [(role, *part) for part in shown] if role == "user" else [(role, content)]
            case "tool":
                found += [("result", message["tool_call_id"], *part) for part in shown]
            case "assistant":
                if message.get("reasoning"):
                    found.append(("reasoning", message["reasoning"]))
                if shown:
                    found.append(("assistant", "".join(text for _, text in shown)))
                for call in message.get("tool_calls", ()):
                    made = call["function"]["arguments"]
                    value = json.loads(made) if isinstance(made, str) else made
                    found.append(("call", call["id"], call["function"]["name"], value))
    return found


def _shown(part: Mapping[str, Any]) -> tuple[str, str]:
    match part["type"]:
        case "text":
            return "text", part["text"]
        case "image_url":
            return "image", part["image_url"]["url"]
        case "image":
            source = part["source"]
            return "image", f"data:{source['media_type']};{source['type']},{source['data']}"
    raise AssertionError(part)


def responses_input(talk: Talk) -> list[dict[str, Any]]:
    """The conversation as items of a Responses request."""
    return [*_items(talk)]


def _items(talk: Talk) -> Iterator[dict[str, Any]]:
    for number, turn in enumerate(talk[1]):
        yield {"role": "user", "content": [_input_part(*part) for part in turn.said]}
        if turn.reasoning:
            thought = [{"type": "reasoning_text", "text": turn.reasoning}]
            yield {"type": "reasoning", "id": "rs", "summary": [], "content": thought}
        if turn.answer:
            said = [{"type": "output_text", "text": text, "annotations": []} for text in turn.answer]
            yield {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": said}
        for index, call in enumerate(turn.calls):
            made = {"name": call.name, "arguments": json.dumps(call.arguments)}
            yield {"type": "function_call", "call_id": f"c{number}-{index}", **made}
        for index, call in enumerate(turn.calls):
            output = [_input_part(*part) for part in call.result]
            yield {"type": "function_call_output", "call_id": f"c{number}-{index}", "output": output}


def _input_part(kind: str, value: str) -> dict[str, Any]:
    if kind == "text":
        return {"type": "input_text", "text": value}
    return {"type": "input_image", "image_url": value, "detail": "auto"}


def messages_input(talk: Talk) -> list[dict[str, Any]]:
    """The conversation as messages of Anthropic's API. Results and what the user says next are one message there."""
    made: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number, turn in enumerate(talk[1]):
        made.append({"role": "user", "content": [*results, *(_block(*part) for part in turn.said)]})
        blocks: list[dict[str, Any]] = []
        if turn.reasoning:
            blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": "s"})
        blocks += [{"type": "text", "text": text} for text in turn.answer]
        results = []
        for index, call in enumerate(turn.calls):
            one = f"c{number}-{index}"
            blocks.append({"type": "tool_use", "id": one, "name": call.name, "input": dict(call.arguments)})
            content = [_block(*part) for part in call.result]
            results.append({"type": "tool_result", "tool_use_id": one, "content": content})
        made += [{"role": "assistant", "content": blocks}] if blocks else []
    made += [{"role": "user", "content": results}] if results else []
    return made


def _block(kind: str, value: str) -> dict[str, Any]:
    if kind == "text":
        return {"type": "text", "text": value}
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": value.partition(",")[2]}}
