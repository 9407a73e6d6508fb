"""The requests of a run, drawn beforehand: pure functions of a seed, so that a run can be repeated.

A question is all that decides an answer, and there are few of them: bare vLLM answers each once. An ask is a question
on its way: of a tenant, with each image sent in one of several ways, streamed or not, left early or to be refused.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from random import Random
from typing import Any, Final, Literal

__all__ = [
    "BARE_REFUSALS",
    "MODEL_REFUSALS",
    "REFUSALS",
    "TENANTS",
    "Ask",
    "Kind",
    "Media",
    "Mix",
    "Question",
    "Source",
    "bodies",
    "draw_image",
    "draw_questions",
    "plan",
]

TENANTS: Final = ("alice", "bob", "carol", "dave")
_SIDE: Final = 56
_CELL: Final = 14
_SCHEMA: Final = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
_TOKENS: Final = 10
_LONG: Final = 48

Source = Literal["data", "url", "file", "named", "name"]
"""An image as base64, by URL, as an uploaded file, as base64 with a name (`uuid`), or by that name alone."""

_SOURCES: Final[tuple[Source, ...]] = ("data", "url", "file", "named", "name")

REFUSALS: Final = (
    *("unknown file", "another tenant's file", "another tenant's name", "damaged image"),
    *("wrong key", "temperature in words", "no messages"),
)
"""Requests that have to be refused, with any engine."""

BARE_REFUSALS: Final = ("damaged image", "temperature in words", "no messages")
"""Those that vLLM without tenants and files refuses too."""

MODEL_REFUSALS: Final = ("logit bias", "stop token", "repetition penalty")
"""Requests that only an engine with a model refuses."""

_SAMPLING: Final[Mapping[str, Mapping[str, object]]] = {
    "temperature in words": {"temperature": "warm"},
    "logit bias": {"logit_bias": {"9999999": 1.0}},
    "stop token": {"stop_token_ids": [9_999_999]},
    "repetition penalty": {"repetition_penalty": 0.0},
}


class Kind(Enum):
    """The fate of a request."""

    WHOLE = "whole"
    STREAMED = "streamed"
    REFUSED = "refused"
    LEFT_EARLY = "left with the first event"
    LEFT_AT_ONCE = "left with the body sent"


@dataclass(frozen=True, slots=True)
class Question:
    """All that decides an answer."""

    text: str
    images: tuple[int, ...] = ()
    api: Literal["chat", "responses"] = "chat"
    sequences: int = 1
    has_schema: bool = False
    next_text: str = ""
    """The second turn of a conversation, which names the stored response to the first."""

    tokens: int = _TOKENS

    @property
    def key(self) -> str:
        """Identifies it in a table of answers."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    number: int
    tenant: str
    question: Question
    sources: tuple[Source, ...] = ()
    kind: Kind = Kind.WHOLE
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Mix:
    """The number of requests, and the share of each kind."""

    requests: int
    seed: int = 0
    images: int = 32
    streamed: float = 0.4
    refused: float = 0.1
    aborted: float = 0.1
    refusals: tuple[str, ...] = REFUSALS


@dataclass(frozen=True, slots=True)
class Media:
    """The images, and how the tenants of a server refer to them; without URLs and files every image is sent itself."""

    images: Sequence[bytes]
    url: str = ""
    """Where image N is `{url}/N.png`."""

    files: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """The file ids of images by tenant."""

    def data_url(self, image: int) -> str:
        """Return an image as base64."""
        return f"data:image/png;base64,{base64.b64encode(self.images[image]).decode()}"


def draw_image(seed: int, number: int) -> bytes:
    """Return a PNG of random blocks; all are of one size."""
    random, cells = Random(f"{seed}/image/{number}"), _SIDE // _CELL
    colours = [[random.randbytes(3) * _CELL for _ in range(cells)] for _ in range(cells)]
    rows = b"".join(b"\0" + b"".join(colours[row // _CELL]) for row in range(_SIDE))
    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    pieces = (b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    chunks = (struct.pack(">I", len(data)) + name + data + _checksum(name + data) for name, data in pieces)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _checksum(data: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(data))


def draw_questions(mix: Mix) -> list[Question]:
    """Return all questions of a run: each image alone, and a few of every other form."""
    random = Random(f"{mix.seed}/questions")

    def some(count: int, of: int = 1) -> list[tuple[int, ...]]:
        return [tuple(random.sample(range(mix.images), of)) for _ in range(count)]

    few = max(2, mix.images // 6)
    return [
        *(Question("what is in this picture?", (image,)) for image in range(mix.images)),
        *(Question("compare the two", pair) for pair in some(few, 2)),
        *(Question(f"count from {number} to ten") for number in range(few)),
        *(Question("describe it in other words", one, sequences=3) for one in some(few)),
        *(Question("how many things are there?", one, has_schema=True, tokens=24) for one in some(few)),
        *(Question("what is in this picture?", one, api="responses") for one in some(few)),
        *(Question("look at this", one, api="responses", next_text="and what else?") for one in some(few)),
    ]


def plan(mix: Mix) -> list[Ask]:
    """Return the requests of a run in order. Some questions are popular."""
    random, questions = Random(f"{mix.seed}/asks"), draw_questions(mix)
    order = random.sample(questions, len(questions))
    weights = [1 / (rank + 1) ** 0.6 for rank in range(len(order))]
    chosen = random.choices(order, weights, k=mix.requests)
    return [_ask(mix, random, number, question) for number, question in enumerate(chosen)]


def _ask(mix: Mix, random: Random, number: int, question: Question) -> Ask:
    tenant, kind, refusal = random.choice(TENANTS), Kind.WHOLE, ""
    drawn = random.random()
    if drawn < mix.refused:
        kind, refusal = Kind.REFUSED, random.choice(mix.refusals)
    elif drawn < mix.refused + mix.aborted:
        kind = random.choice((Kind.LEFT_EARLY, Kind.LEFT_AT_ONCE))
    elif drawn < mix.refused + mix.aborted + mix.streamed:
        kind = Kind.STREAMED
    known = [one for one in _SOURCES if question.api == "chat" or one not in ("named", "name")]
    return Ask(number, tenant, question, tuple(random.choice(known) for _ in question.images), kind, refusal)


def bodies(ask: Ask, media: Media, *, is_bare: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Return the path and the body of each turn; the second of two wants the `previous_response_id` of the first."""
    question = ask.question
    if ask.refusal:
        return [_refused(ask, media)]
    if question.api == "chat":
        return [("/v1/chat/completions", _chat(ask, media, is_bare=is_bare))]
    content = [_input_image(image, media, source, ask.tenant) for image, source in _pairs(ask)]
    first = [{"role": "user", "content": [*content, {"type": "input_text", "text": question.text}]}]
    common: dict[str, Any] = {"temperature": 0.0, "max_output_tokens": question.tokens}
    streams = {"stream": True} if ask.kind is not Kind.WHOLE else {}
    if not question.next_text:
        return [("/v1/responses", {"input": first, "store": False, **common, **streams})]
    return [
        ("/v1/responses", {"input": first, "store": True, **common}),
        ("/v1/responses", {"input": question.next_text, **common, **streams}),
    ]


def _pairs(ask: Ask) -> list[tuple[int, Source]]:
    images = ask.question.images
    sources = ask.sources or tuple(_SOURCES[0] for _ in images)
    return list(zip(images, sources, strict=True))


def _chat(ask: Ask, media: Media, *, is_bare: bool) -> dict[str, Any]:
    question = ask.question
    content = [_part(image, media, source, ask.tenant) for image, source in _pairs(ask)]
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": question.text}]}],
        "temperature": 0.0,
        "max_tokens": question.tokens,
        "return_token_ids": True,
    }
    if question.sequences > 1:  # vLLM takes no greedy one
        body |= {"n": question.sequences, "temperature": 0.5, "seed": 7}
    if question.has_schema:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}
    if is_bare:
        return body | {"logprobs": True, "top_logprobs": 2}
    if ask.kind in (Kind.LEFT_EARLY, Kind.LEFT_AT_ONCE):
        return body | {"stream": True, "max_tokens": _LONG, "ignore_eos": True}
    return body | {"stream": True} if ask.kind is Kind.STREAMED else body


def _part(image: int, media: Media, source: Source, tenant: str) -> dict[str, Any]:
    name = f"{tenant}-{image}"
    match source:
        case "url" if media.url:
            return {"type": "image_url", "image_url": {"url": f"{media.url}/{image}.png"}}
        case "file" if (tenant, image) in media.files:
            return {"type": "image_url", "image_url": {"file_id": media.files[tenant, image]}}
        case "named":
            return {"type": "image_url", "image_url": {"url": media.data_url(image)}, "uuid": name}
        case "name":
            return {"type": "image_url", "image_url": None, "uuid": name}
        case _:
            return {"type": "image_url", "image_url": {"url": media.data_url(image)}}


def _input_image(image: int, media: Media, source: Source, tenant: str) -> dict[str, Any]:
    if source == "file" and (tenant, image) in media.files:
        return {"type": "input_image", "detail": "auto", "file_id": media.files[tenant, image]}
    url = f"{media.url}/{image}.png" if source == "url" and media.url else media.data_url(image)
    return {"type": "input_image", "detail": "auto", "image_url": url}


def _refused(ask: Ask, media: Media) -> tuple[str, dict[str, Any]]:
    """Return a request that has to be refused."""
    other = TENANTS[(TENANTS.index(ask.tenant) + 1) % len(TENANTS)]
    content: list[dict[str, Any]] = [{"type": "text", "text": "what is this?"}]
    match ask.refusal:
        case "unknown file":
            content.append({"type": "image_url", "image_url": {"file_id": f"file-{'0' * 64}"}})
        case "another tenant's file":
            content.append({"type": "image_url", "image_url": {"file_id": _file_of(other, ask.number, media)}})
        case "another tenant's name":
            image = ask.number % len(media.images)
            content.append({"type": "image_url", "image_url": None, "uuid": f"{other}-{image}"})
        case "damaged image":
            damaged = base64.b64encode(media.images[ask.number % len(media.images)][:60]).decode()
            content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{damaged}"}})
    messages = [] if ask.refusal == "no messages" else [{"role": "user", "content": content}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 4, **_SAMPLING.get(ask.refusal, {})}


def _file_of(tenant: str, number: int, media: Media) -> str:
    """Return a file of a tenant; ids are of content and tenant, so no other tenant has the same."""
    ids = [file for (owner, _), file in media.files.items() if owner == tenant]
    return ids[number % len(ids)] if ids else f"file-{'1' * 64}"
