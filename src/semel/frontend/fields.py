"""Fields of vLLM's and OpenAI's requests that are not carried out: those that change nothing, and those refused.

Both lists stand here and nowhere else; docs/api.md is held against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

from semel.errors import InvalidRequest

__all__ = ["REFUSED", "Ignored", "without_refused"]


class Ignored(BaseModel):
    """Accepted and not looked at: with a server of one's own they cannot change the answer."""

    metadata: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    session_id: Any = None
    store: Any = None
    user: Any = None


REFUSED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "add_special_tokens": ((False,), "the chat template writes the special tokens"),
    "audio": ((), "answers are text"),
    "best_of": ((1,), "ask for n answers and choose"),
    "chat_template": ((), "templates from clients are not run; the operator sets one with --chat-template"),
    "early_stopping": ((False,), "there is no beam search"),
    "echo": ((False,), "put the last message and the answer together"),
    "ec_transfer_params": ((), "where features travel is not a client's to say"),
    "function_call": (("none",), "use tool_choice"),
    "functions": (([],), "use tools"),
    "guided_choice": ((), "use structured_outputs"),
    "guided_grammar": ((), "use structured_outputs"),
    "guided_json": ((), "use structured_outputs"),
    "guided_regex": ((), "use structured_outputs"),
    "kv_transfer_params": ((), "where prefixes travel is not a client's to say"),
    "length_penalty": ((1, 1.0), "there is no beam search"),
    "media_io_kwargs": (({},), "how media are read is the operator's to say"),
    "mm_payload": (("tensors",), "ask for tensors with the header Accept: application/x-safetensors"),
    "modalities": ((["text"],), "answers are text"),
    "prompt_embeds": ((), "send text or tokens"),
    "return_mm_kwargs": ((), "ask for tensors with the header Accept: application/x-safetensors"),
    "return_prompt_text": ((False,), "/v1/chat/completions/render shows a prompt's tokens"),
    "return_token_offsets": ((False,), "/tokenize shows tokens without offsets"),
    "routed_experts_prompt_start": ((0,), "experts are not told"),
    "suffix": ((), "send what comes before alone"),
    "truncate_prompt_tokens": ((), "a cut could go through an item; send less"),
    "truncation_side": ((), "prompts are not cut"),
    "use_beam_search": ((False,), "ask for n answers"),
    "verbosity": (("medium",), "say in the prompt how long the answer should be"),
    "vllm_xargs": (({},), "arguments for plug-ins are the operator's to give"),
    "watermarking": ((False,), "it is the operator's to set"),
    "web_search_options": ((), "nothing is searched; offer a tool"),
}
"""Not supported: the values that mean the same as leaving it out, and what to do instead."""


def without_refused(body: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The body of a request without fields that say nothing; those that say what is not supported are refused by name.

    A field of the request's own, in `known`, is not touched, but for null: it means the same as leaving it out.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name not in known and name in REFUSED:
            neutral, instead = REFUSED[name]
            if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
                raise InvalidRequest(f"{name}: not supported: {instead}")
        elif value is not None or name not in known:
            kept[name] = value
    return kept
