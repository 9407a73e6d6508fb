"""`llama-index-llms-openai-like`: OpenAILike."""

from typing import Any, Literal

from driver import LONG, QUESTION, TEXT, TOKENS, png, server, tell
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

SERVER = server()


class Place(BaseModel):
    """A place."""

    city: Literal["Oslo", "Rome"]


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather."""
    return city


def llm(tokens: int = TOKENS, **options: Any) -> OpenAILike:
    return OpenAILike(
        model=SERVER.model,
        api_base=SERVER.v1,
        api_key="none",
        is_chat_model=True,
        temperature=0,
        max_tokens=tokens,
        max_retries=0,
        context_window=4096,
        **options,
    )


def streamed() -> Any:
    pieces = [*llm().stream_chat([ChatMessage(role="user", content=TEXT)])]
    return {"joined": "".join(piece.delta or "" for piece in pieces), "message": pieces[-1].message}


def main() -> None:
    parts = [ImageBlock(image=png(), image_mimetype="image/png"), TextBlock(text=QUESTION)]
    tell("chat", "text", lambda: llm().chat([ChatMessage(role="user", content=TEXT)]))
    tell("chat", "image", lambda: llm().chat([ChatMessage(role="user", blocks=parts)]))
    tell("chat", "stream", streamed)
    caller = llm(LONG, is_function_calling_model=True, strict=True)
    tool = FunctionTool.from_defaults(weather)
    tell("chat", "tools", lambda: caller.chat_with_tools([tool], user_msg=TEXT, tool_required=True))
    formed = llm(LONG, should_use_structured_outputs=True).as_structured_llm(Place)
    tell("chat", "structured", lambda: formed.chat([ChatMessage(role="user", content=TEXT)]))
    tell(
        "completions",
        "text",
        lambda: llm(is_function_calling_model=False).model_copy(update={"is_chat_model": False}).complete(TEXT),
    )


if __name__ == "__main__":
    main()
