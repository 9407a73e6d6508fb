"""`instructor`: every answer is an object, made by a schema or by the call of a tool."""

from typing import Any, Literal

import instructor
import openai
from driver import LONG, TEXT, image_parts, server, tell, user
from instructor.core import InstructorRetryException
from pydantic import BaseModel

SERVER = server()


class Place(BaseModel):
    """A place."""

    city: Literal["Oslo", "Rome"]


def client(mode: instructor.Mode) -> Any:
    made = openai.OpenAI(base_url=SERVER.v1, api_key="none", max_retries=0, timeout=120)
    return instructor.from_openai(made, mode=mode)


def create(mode: instructor.Mode, content: Any, **fields: Any) -> Any:
    found, raw = client(mode).chat.completions.create_with_completion(**options(content), **fields)
    return {"object": found, "raw": raw}


def called() -> Any:
    """A call of a tool. The tiny model's arguments are no object, if not strict: the exception has the answer."""
    try:
        return create(instructor.Mode.TOOLS, TEXT)
    except InstructorRetryException as error:
        return {"exception": str(error.failed_attempts[-1].exception), "raw": error.last_completion}


def options(content: Any) -> dict[str, Any]:
    return {
        "model": SERVER.model,
        "response_model": Place,
        "messages": user(content),
        "temperature": 0,
        "max_tokens": LONG,
        "max_retries": 0,
    }


def streamed() -> Any:
    return [*client(instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(**options(TEXT))][-1]


def main() -> None:
    tell("chat", "text", lambda: create(instructor.Mode.JSON_SCHEMA, TEXT))
    tell("chat", "image", lambda: create(instructor.Mode.JSON_SCHEMA, image_parts()))
    tell("chat", "stream", streamed)
    tell("chat", "tools", called)
    tell("chat", "structured", lambda: create(instructor.Mode.JSON_SCHEMA, TEXT))


if __name__ == "__main__":
    main()
