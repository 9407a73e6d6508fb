"""`anthropic`: messages."""

from typing import Any

import anthropic
from driver import LONG, QUESTION, SCHEMA, TEXT, TOKENS, pdf_base64, png_base64, server, tell, user

SERVER = server()
CLIENT = anthropic.Anthropic(base_url=SERVER.url, api_key="none", max_retries=0, timeout=120)
MESSAGE: dict[str, Any] = {"model": SERVER.model, "max_tokens": TOKENS, "extra_body": {"temperature": 0}}
"""Its types have no temperature any more; servers of other models do."""


def create(**fields: Any) -> Any:
    return CLIENT.messages.create(**{**MESSAGE, **fields})


def streamed() -> Any:
    with CLIENT.messages.stream(**MESSAGE, messages=user(TEXT)) as stream:
        text = "".join(stream.text_stream)
        return {"joined": text, "final": stream.get_final_message()}


def documents() -> Any:
    """Ask about a PDF, which bare vLLM does not take."""
    source = {"type": "base64", "media_type": "application/pdf", "data": pdf_base64()}

    def ask(**options: Any) -> Any:
        document = {"type": "document", "source": source, **options}
        return create(messages=user([document, {"type": "text", "text": QUESTION}]))

    first, again, one = ask(), ask(title="two.pdf"), ask(page_range="2", dpi=100)
    return {
        "answered": bool(first.content[0].text),
        "a title is text": again.usage.input_tokens > first.usage.input_tokens,
        "one page": bool(one.content[0].text),
    }


def main() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png_base64()}}
    tell("messages", "text", lambda: create(messages=user(TEXT), system="Be brief."))
    tell("messages", "image", lambda: create(messages=user([image, {"type": "text", "text": QUESTION}])))
    tell("messages", "stream", streamed)
    tool = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA, "strict": True}
    call = {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": LONG}
    tell("messages", "tools", lambda: create(messages=user(TEXT), **call))
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    tell("messages", "structured", lambda: create(messages=user(TEXT), max_tokens=LONG, output_config=form))
    tell("documents", "image", documents)


if __name__ == "__main__":
    main()
