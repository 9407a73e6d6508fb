"""`langchain-openai`: ChatOpenAI."""

from typing import Any, Literal

from driver import LONG, TEXT, TOKENS, data_url, server, tell
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

SERVER = server()


class Place(BaseModel):
    """A place."""

    city: Literal["Oslo", "Rome"]


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather."""
    return city


def chat(tokens: int = TOKENS, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=SERVER.model,
        base_url=SERVER.v1,
        api_key="none",
        temperature=0,
        max_tokens=tokens,
        max_retries=0,
        **options,
    )


def streamed() -> Any:
    whole: Any = None
    for chunk in chat(stream_usage=True).stream(TEXT):
        whole = chunk if whole is None else whole + chunk
    return whole


def main() -> None:
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": data_url()}},
        {"type": "text", "text": "What is in the image?"},
    ]
    tell("chat", "text", lambda: chat().invoke([("system", "Be brief."), ("human", TEXT)]))
    tell("chat", "image", lambda: chat().invoke([HumanMessage(content=parts)]))
    tell("chat", "stream", streamed)
    bound = chat(LONG).bind_tools([weather], tool_choice="any", strict=True, parallel_tool_calls=False)
    tell("chat", "tools", lambda: bound.invoke(TEXT))
    formed = chat(LONG).with_structured_output(Place, method="json_schema", include_raw=True)
    tell("chat", "structured", lambda: formed.invoke(TEXT))
    # ChatOpenAI speaks /v1/responses too, if it is told to.
    tell("responses", "text", lambda: chat(use_responses_api=True).invoke(TEXT))
    tell("responses", "image", lambda: chat(use_responses_api=True).invoke([HumanMessage(content=parts)]))
    called = chat(LONG, use_responses_api=True).bind_tools(
        [weather], tool_choice="any", strict=True, parallel_tool_calls=False
    )
    tell("responses", "tools", lambda: called.invoke(TEXT))


if __name__ == "__main__":
    main()
