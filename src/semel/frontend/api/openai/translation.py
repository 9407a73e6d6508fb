"""A request of another API as a chat: what all translations share.

A translation happens while the body is parsed, where that is done: in a thread if the body is large. So the chat is the
request from then on, and everything that holds for chats holds for it. What the answer needs of the request besides is
kept apart and is small, since it stays until the answer ends; the chat has the media, and is dropped early.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

from pydantic import ValidationError

from semel.core import Tenant
from semel.errors import RequestError
from semel.frontend.api.openai.requests import ChatCompletionRequest
from semel.frontend.api.shared.faults import fault_of, split_field

__all__ = ["ClientTerms", "Messages", "Translated", "file_of", "to_chat"]

_MESSAGE: Final = re.compile(r"messages\[(\d+)\]")

_Echo = TypeVar("_Echo")


@dataclass(slots=True)
class Messages:
    """The messages of a chat, each with the place in the client's request that it comes from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Of each item in the chat, its number in the client's request, where the order is another."""

    def add(self, message: dict[str, Any], place: str) -> None:
        """Add a message."""
        self.messages.append(message)
        self.places.append(place)

    def open_assistant(self, name: str) -> dict[str, Any] | None:
        """The last message, if it is the assistant's and has no `name` yet, so that it can be put there."""
        last = self.messages[-1] if self.messages else {}
        return last if last.get("role") == "assistant" and name not in last else None

    def put(self, name: str, value: object, place: str) -> None:
        """Put a field into the assistant's message that is under way, or begin one."""
        if (message := self.open_assistant(name)) is not None:
            message[name] = value
        else:
            self.add({"role": "assistant", name: value}, place)

    def call(self, call: dict[str, Any], place: str) -> None:
        """Add a tool call to the assistant's message that is under way, or begin one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant":
            last.setdefault("tool_calls", []).append(call)
        else:
            self.add({"role": "assistant", "tool_calls": [call]}, place)


@dataclass(frozen=True, slots=True)
class ClientTerms:
    """The names of a chat's fields in the client's own request, for errors."""

    fields: Mapping[str, str] = field(default_factory=dict)
    places: Sequence[str] = ()
    """Of each message."""

    @contextmanager
    def reworded(self) -> Iterator[None]:
        """Errors that are raised inside name the client's fields."""
        try:
            yield
        except RequestError as error:
            if (param := error.param) is not None and (place := self._place(param)) != param:
                message = str(error)
                error.args = (message.replace(param, place, 1),)
                error.param = place
            raise

    def _place(self, param: str) -> str:
        found = _MESSAGE.match(param)
        if found is None:
            inner = max((name for name in self.fields if f"{param}.".startswith(f"{name}.")), key=len, default="")
            name = inner or split_field(param)[0]
            return self.fields.get(name, name) + param[len(name) :]
        if (index := int(found[1])) >= len(self.places):
            return param
        return self.places[index] + param[found.end() :]


@dataclass(slots=True)
class Translated(Generic[_Echo]):
    """A request of another API as a chat."""

    _chat: ChatCompletionRequest | None
    echo: _Echo
    """The parts of the request that the answer needs."""

    terms: ClientTerms
    model: str | None = None
    priority: int = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the chat."""
        return [] if self._chat is None else self._chat.messages

    def tenant(self, name: str) -> Tenant:
        """The tenant of the chat; `name` is the one bound to the API key."""
        return Tenant(name) if self._chat is None else self._chat.tenant(name)

    def put_before(self, earlier: Messages, *, behind: str) -> None:
        """Put the messages of an earlier chat before those of this one, but behind one that comes from this place.

        What the assistant says at the end of one and the beginning of the other becomes one message, as in `Messages`.
        """
        places = self.terms.places
        begin = end = int(places[:1] == (behind,))
        if end < len(self.messages) and (first := self.messages[end])["role"] == "assistant":
            for name, value in first.items():
                if name == "tool_calls":
                    for call in value:
                        earlier.call(call, places[end])
                elif name != "role":
                    earlier.put(name, value, places[end])
            end += 1
        self.messages[begin:end] = earlier.messages
        self.terms = replace(self.terms, places=(*places[:begin], *earlier.places, *places[end:]))

    def name_media(self, *, always: bool) -> bool:
        """Return whether the client wants the ids of all items; `always` have them."""
        assert self._chat is not None
        is_wanted = self._chat.return_media_ids
        if always and not is_wanted:
            self._chat = self._chat.model_copy(update={"return_media_ids": True})
        return is_wanted

    def take(self) -> ChatCompletionRequest:
        """The chat, once: whoever takes it decides how long its media stay in memory."""
        chat, self._chat = self._chat, None
        assert chat is not None
        return chat


def to_chat(fields: Mapping[str, Any], echo: Callable[[], _Echo], terms: ClientTerms) -> Translated[_Echo]:
    """The chat with these fields; those that are None are left out."""
    present = {name: value for name, value in fields.items() if value is not None}
    with terms.reworded():
        try:
            chat = ChatCompletionRequest.model_validate(present)
        except ValidationError as error:
            raise fault_of(error) from None
    return Translated(chat, echo(), terms, chat.model, chat.priority)


def file_of(file_id: object, url: object = None) -> dict[str, Any]:
    """A file, as parts of a chat name it; chats refuse one that has a URL too."""
    return {"file_id": file_id} if url is None else {"file_id": file_id, "url": url}
