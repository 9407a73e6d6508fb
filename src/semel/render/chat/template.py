"""The chat template of a model folder: its choice and its variables.

The order is vLLM's: the operator's template, then the processor's, then the tokenizer's. A request with tools skips the
processor's, because only tokenizers have a template named "tool_use". Clients cannot send templates (threats S15).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from blake3 import blake3

from semel.errors import ConfigError, InvalidRequest
from semel.render.chat.content_format import ContentFormat
from semel.render.chat.sandbox import Template

__all__ = ["ChatTemplate", "hash_templates"]

_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_RESERVED: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "tokenize",
        "tools",
    }
)
_INLINE: Final = frozenset("{}\n")
"""Jinja has these characters; paths and names do not."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The compiled templates of a model, with the special tokens that they may name."""

    plain: Template
    with_tools: Template
    special_tokens: Mapping[str, str]
    is_operators: bool = False
    """True if the operator has named it, with `--chat-template`."""

    @classmethod
    def load(cls, folder: Path, *, override: str | Path | None = None, tokenizer: Path | None = None) -> Self:
        """The template of the model in `folder`, or `override`: a file, a Jinja text, or the name of one of its own.

        `tokenizer` is the folder of a tokenizer that is not the model's own.
        """
        tokenizer = tokenizer or folder
        special_tokens = MappingProxyType(_special_tokens(tokenizer))
        if override is not None:
            chosen = _overriding(folder, tokenizer, override)
            return cls(chosen, chosen, special_tokens, is_operators=True)
        of_tokenizer = _tokenizer_texts(tokenizer)
        plain = _processor_texts(folder).get("default") or of_tokenizer.get("default")
        if plain is None:
            raise ConfigError(_nothing_found(folder, of_tokenizer))
        with_tools = of_tokenizer.get("tool_use") or of_tokenizer.get("default") or plain
        origin = f"the chat template of {folder}"
        compiled = Template.compile(plain, origin=origin)
        if with_tools == plain:
            return cls(compiled, compiled, special_tokens)
        return cls(compiled, Template.compile(with_tools, origin=f"{origin} for tools"), special_tokens)

    @property
    def content_format(self) -> ContentFormat:
        """The content format of the template that is used without tools."""
        return self.plain.content_format

    def with_format(self, content_format: ContentFormat) -> Self:
        """Return the same templates, given content in this format whatever their syntax says."""
        plain, with_tools = (replace(one, content_format=content_format) for one in (self.plain, self.with_tools))
        return replace(self, plain=plain, with_tools=with_tools)

    def chosen_for(self, tools: Sequence[object] | None) -> Template:
        """Return the template for a request with these tools; None means that the request names none."""
        return self.plain if tools is None else self.with_tools

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[object] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, object],
    ) -> str:
        """Return the prompt as text. `kwargs` are the request's own variables, for templates that use them."""
        template = self.chosen_for(tools)
        if reserved := kwargs.keys() & (_RESERVED | template.names | self.special_tokens.keys()):
            raise InvalidRequest(f"chat_template_kwargs must not set {', '.join(sorted(reserved))}: leave that out")
        own = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return template.render({"documents": None, **self.special_tokens, **kwargs, **own})


def _overriding(folder: Path, tokenizer: Path, override: str | Path) -> Template:
    if isinstance(override, str) and not _INLINE.isdisjoint(override):
        return Template.compile(override, origin="the chat template given as text")
    named = _processor_texts(folder) | _tokenizer_texts(tokenizer)
    if isinstance(override, str) and override in named:
        return Template.compile(named[override], origin=f"the chat template {override!r} of {folder}")
    path = Path(override)
    if not path.is_file():
        names = ", ".join(sorted(named)) or "none"
        raise ConfigError(
            f"there is no chat template {str(override)!r}: name a file, or one of the templates of {folder} ({names})"
        )
    return Template.compile(path.read_text(encoding="utf-8"), origin=f"the chat template {path}")


def hash_templates(folder: Path, tokenizer: Path) -> str:
    """Return a hash of all chat templates of a model folder and its tokenizer's; empty if there is none."""
    texts = {"processor": _processor_texts(folder), "tokenizer": _tokenizer_texts(tokenizer)}
    return blake3(json.dumps(texts, sort_keys=True).encode()).hexdigest(length=16) if any(texts.values()) else ""


def _processor_texts(folder: Path) -> dict[str, str]:
    """Return the processor's templates by name, in the precedence of transformers 5."""
    if (configured := _json(folder / "processor_config.json").get("chat_template")) is not None:
        return _named(configured, folder / "processor_config.json")
    legacy = folder / "chat_template.json"
    files = _template_files(folder)
    if not legacy.is_file():
        return files
    if files.keys() - {"default"}:
        return {}  # transformers refuses to load a processor with both, so it has no template
    return _named(_json(legacy).get("chat_template"), legacy)


def _tokenizer_texts(folder: Path) -> dict[str, str]:
    """Return the tokenizer's templates by name: files take precedence over the entry in its config."""
    config = folder / "tokenizer_config.json"
    return _template_files(folder) or _named(_json(config).get("chat_template"), config)


def _template_files(folder: Path) -> dict[str, str]:
    named = {path.name.removesuffix(".jinja"): path for path in folder.glob("additional_chat_templates/*.jinja")}
    if (default := folder / "chat_template.jinja").is_file():
        named["default"] = default
    return {name: path.read_text(encoding="utf-8") for name, path in named.items()}


def _named(entry: object, path: Path) -> dict[str, str]:
    """Return the entry "chat_template" of a config: one text, or several with names."""
    match entry:
        case None:
            return {}
        case str():
            return {"default": entry}
        case dict():
            return entry
        case list() if all(isinstance(one, dict) and {"name", "template"} <= one.keys() for one in entry):
            return {one["name"]: one["template"] for one in entry}
    raise ConfigError(f'{path}: "chat_template" must be a text or a list of objects with "name" and "template"')


def _special_tokens(folder: Path) -> dict[str, str]:
    config = _json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _json(folder / "special_tokens_map.json")  # folders from before 2023 have them there
    tokens = {name: config.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def _nothing_found(folder: Path, named: Mapping[str, str]) -> str:
    if named:
        return f"{folder} has chat templates but no default: name one with --chat-template: {', '.join(sorted(named))}"
    return f"{folder} has no chat template: give a Jinja file with --chat-template, or add chat_template.jinja to it"
