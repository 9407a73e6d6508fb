"""The requests that clients, gateways and user interfaces send, as they send them, and what bare vLLM 0.32 answers.

`python -m tools.user_trial URL` sends them to a server, semel or vLLM, and prints what it answers.
Transcriptions and other media have tests of their own (`test_transcriptions`, `tests/serve`).
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from PIL import Image

CHAT = "/v1/chat/completions"
OK, REFUSED = 200, 400
HELLO = [{"role": "user", "content": "Say hello."}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FUNCTION = {"name": "look", "description": "Look.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}

Body = Callable[[str], Mapping[str, Any]]
"""Makes a body with an image, whose data URL is the argument."""


@dataclass(frozen=True)
class Row:
    """One request."""

    client: str
    body: Body
    vllm: int = OK
    """The status of bare vLLM."""

    route: str = CHAT
    worse: str = ""
    """If semel refuses what vLLM answers: the words of docs/api/routes.md that give the reason."""


def chat(**fields: Any) -> Body:
    return lambda _: {"messages": HELLO, **fields}


def seen(part: Callable[[str], Mapping[str, Any]], **fields: Any) -> Body:
    """A chat with a text and a part made of the image."""
    return lambda url: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part(url)]}],
        **fields,
    }


def image_url(url: str) -> Mapping[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def anthropic_image(url: str) -> Mapping[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    return {"type": "image", "source": source}


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ECHOED = [
    *HELLO,
    {
        "role": "assistant",
        "content": "Hello.",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    },
    *HELLO,
]
ROWS = (
    Row("openai: text", chat(model=None)),
    Row("openai: image", seen(image_url)),
    Row("openai: detail", seen(lambda url: {"type": "image_url", "image_url": {"url": url, "detail": "low"}})),
    Row("openai: stream with usage", chat(**USAGE)),
    Row("openai: json_schema", chat(response_format=FORMAT)),
    Row("openai: json_object", chat(response_format={"type": "json_object"})),
    Row("openai: developer", lambda _: {"messages": [{"role": "developer", "content": "Be short."}, *HELLO]}),
    Row("openai: history sent back", lambda _: {"messages": ECHOED}),
    Row("openai: verbosity", chat(verbosity="low")),
    Row("openai: store, metadata, user", chat(store=True, metadata={"a": "b"}, user="u", service_tier="auto")),
    Row("openai: responses", lambda _: {"input": "Say hello."}, route="/v1/responses"),
    Row(
        "openai: responses with an image",
        lambda url: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
        route="/v1/responses",
    ),
    Row("openai: responses, stream", lambda _: {"input": "Say hello.", "stream": True}, route="/v1/responses"),
    Row("openai: tools auto without flags", chat(tools=[TOOL]), REFUSED),
    Row("openai: tools required without flags", chat(tools=[TOOL], tool_choice="required"), REFUSED),
    Row("openai: tool_choice none", chat(tools=[TOOL], tool_choice="none")),
    Row("openai: completions", lambda _: {"prompt": "Hello", "max_tokens": 4, "echo": True}, route="/v1/completions"),
    Row("LangChain: text", chat(temperature=0.0, n=1, stream=False)),
    Row("LangChain: image block", seen(image_url, stream=False)),
    Row("LangChain: structured output", chat(response_format=FORMAT, parallel_tool_calls=None)),
    Row("LangChain: stream with usage", chat(**USAGE, temperature=0.7)),
    Row("LlamaIndex: text", chat(temperature=0.1, max_tokens=16)),
    Row("LlamaIndex: image", seen(image_url, temperature=0.1, max_tokens=16)),
    Row("litellm: metadata, user", chat(metadata={"trace": "1"}, user="u", extra_body=None)),
    Row(
        "litellm: cache_control",
        lambda _: {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {}}]}]},
    ),
    Row("instructor: JSON_SCHEMA", chat(response_format=FORMAT)),
    Row(
        "instructor: tools without flags",
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "look"}}),
        REFUSED,
    ),
    Row(
        "Agents SDK: responses",
        lambda _: {"input": HELLO, "instructions": "Be short.", "include": []},
        route="/v1/responses",
    ),
    Row("Agents SDK: chats", chat(tool_choice=None, parallel_tool_calls=None, store=None)),
    Row("Anthropic SDK", chat(max_tokens=16), route="/v1/messages"),
    Row("Anthropic SDK: image", seen(anthropic_image, max_tokens=16), route="/v1/messages"),
    Row("Anthropic SDK: stream", chat(max_tokens=16, stream=True), route="/v1/messages"),
    Row("Anthropic SDK: count_tokens", chat(), route="/v1/messages/count_tokens"),
    Row("Open WebUI: stream", chat(**USAGE)),
    Row(
        "Open WebUI: fields of its own",
        chat(chat_id="1", id="2", session_id="3", features={"web_search": False}, background_tasks={"tags": True}),
    ),
    Row("Open WebUI: variables, tool_ids", chat(variables={"a": "b"}, tool_ids=[], files=[], filter_ids=[], params={})),
    Row("Vercel AI", chat(temperature=0, **USAGE)),
    Row("LibreChat: name", lambda _: {"messages": [{"role": "user", "name": "u", "content": "Hello"}], "stream": True}),
    Row(
        "OpenRouter: provider, usage",
        chat(provider={"sort": "price"}, usage={"include": True}, models=["a"], route="fallback"),
    ),
    Row("OpenRouter: reasoning", chat(reasoning={"effort": "low"}, transforms=[], plugins=[], top_a=0.1)),
    Row("DashScope: enable_thinking", chat(enable_thinking=False, thinking_budget=16, enable_search=False)),
    Row("Ollama: options", chat(options={"num_ctx": 4096}, keep_alive="5m", format=None, think=False)),
    Row("llama.cpp: cache_prompt", chat(cache_prompt=True, n_predict=-1, repeat_penalty=1.1, typical_p=1, min_keep=0)),
    Row("SGLang: separate_reasoning", chat(separate_reasoning=True, regex=None, ebnf=None)),
    Row("guided_json", chat(guided_json=SCHEMA), worse="vLLM ignores them now and answers unconstrained"),
    Row("image_url as a string", seen(lambda url: {"type": "image_url", "image_url": url}), REFUSED),
    Row(
        "input_text",
        lambda _: {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]},
        REFUSED,
    ),
    Row("input_image", seen(lambda url: {"type": "input_image", "image_url": url}), REFUSED),
    Row("a misspelt field", chat(temprature=0), worse='400, "did you mean …?"'),
    Row("truncate_prompt_tokens", chat(truncate_prompt_tokens=64), worse="`truncate_prompt_tokens`, `truncation_side`"),
    Row("beam search", chat(use_beam_search=True, n=2), worse="there is no beam search"),
    Row("tokenize with strings", lambda _: {"prompt": "hello", "return_token_strs": True}, route="/tokenize"),
    Row("SageMaker: chat", chat(max_tokens=4), route="/invocations"),
    Row("SageMaker: completion", lambda _: {"prompt": "Hello", "max_tokens": 4}, route="/invocations"),
    Row(
        "a batch of chats",
        lambda _: {"messages": [HELLO, HELLO]},
        route="/v1/chat/completions/batch",
        worse="`/v1/chat/completions/batch`",
    ),
    Row("an empty list of messages", lambda _: {"messages": []}, REFUSED),
    Row("no messages", lambda _: {}, REFUSED),
)


def body_of(row: Row, url: str, model: str) -> dict[str, Any]:
    """The body of a row with an image. Anthropic's clients always name a model, and vLLM refuses a message without."""
    named = {"model": model} if row.route.startswith("/v1/messages") else {}
    return {**named, **row.body(url)}


def gradient(side: int = 64) -> str:
    """The data URL of an image that every model takes."""
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((side, side)).convert("RGB").save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def main(url: str) -> None:
    """Send all of them, and print the statuses."""
    with httpx.Client(base_url=url, timeout=120) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        image = gradient()
        for row in ROWS:
            body = body_of(row, image, model)
            reply = client.post(row.route, json={"max_tokens": 4, **body} if row.route == CHAT else body)
            ignored = reply.headers.get("x-semel-ignored-fields", "")
            said = "" if reply.status_code == OK else reply.text[:160]
            sys.stdout.write(f"| {row.client} | {reply.status_code} | {row.vllm} | {ignored} | {said} |\n")


if __name__ == "__main__":
    main(sys.argv[1])
