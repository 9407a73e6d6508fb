"""`openai`: chats, responses, files."""

import base64
from typing import Any

import openai
from driver import (
    FORMAT,
    LONG,
    QUESTION,
    SCHEMA,
    TEXT,
    TOKENS,
    TOOL,
    data_url,
    image_parts,
    pdf_base64,
    png,
    server,
    tell,
    user,
)
from openai.lib.streaming.chat import ChatCompletionStreamState

SERVER = server()
CLIENT = openai.OpenAI(base_url=SERVER.v1, api_key="none", max_retries=0, timeout=120)
CHAT: dict[str, Any] = {"model": SERVER.model, "temperature": 0, "max_tokens": TOKENS}
RESPONSE: dict[str, Any] = {"model": SERVER.model, "temperature": 0, "max_output_tokens": TOKENS}
NAMED = {"type": "function", "function": {"name": "weather"}}


def streamed_chat() -> Any:
    """Put together by the client's own code; its `stream` raises if an answer is cut at `max_tokens`."""
    state: Any = ChatCompletionStreamState()
    text = ""
    for chunk in CLIENT.chat.completions.create(
        **CHAT, messages=user(TEXT), stream=True, stream_options={"include_usage": True}
    ):
        state.handle_chunk(chunk)
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    return {"joined": text, "final": state.current_completion_snapshot}


def streamed_response() -> Any:
    events = [*CLIENT.responses.create(**RESPONSE, input=TEXT, stream=True)]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    return {"joined": text, "events": list(dict.fromkeys(one.type for one in events)), "final": events[-1]}


def chats() -> None:
    create = CLIENT.chat.completions.create
    tell("chat", "text", lambda: create(**CHAT, messages=user(TEXT)))
    tell("chat", "image", lambda: create(**CHAT, messages=user(image_parts())))
    tell("chat", "stream", streamed_chat)
    long = {**CHAT, "max_tokens": LONG, "messages": user(TEXT)}
    tell("chat", "tools", lambda: [create(**long, tools=[TOOL], tool_choice=one) for one in ("required", NAMED)])
    tell("chat", "structured", lambda: create(**long, response_format=FORMAT))


def responses() -> None:
    create = CLIENT.responses.create
    parts = [
        {"type": "input_image", "image_url": data_url(), "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    tell("responses", "text", lambda: create(**RESPONSE, input=TEXT, instructions="Be brief."))
    tell("responses", "image", lambda: create(**RESPONSE, input=user(parts)))
    tell("responses", "stream", streamed_response)
    long = {**RESPONSE, "max_output_tokens": LONG, "input": TEXT}
    tool = {"type": "function", **TOOL["function"]}
    tell("responses", "tools", lambda: create(**long, tools=[tool], tool_choice="required", parallel_tool_calls=False))
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    tell("responses", "structured", lambda: create(**long, text={"format": form}))


def files() -> None:
    """Only semel has them: what comes back is what went in."""

    def upload() -> Any:
        file = CLIENT.files.create(file=("drawn.png", png()), purpose="vision")
        part = {"type": "file", "file": {"file_id": file.id}}
        by_file = CLIENT.chat.completions.create(**CHAT, messages=user([part, {"type": "text", "text": QUESTION}]))
        whole = CLIENT.chat.completions.create(**CHAT, messages=user(image_parts()))
        return {
            "listed": file.id in [one.id for one in CLIENT.files.list()],
            "retrieved": CLIENT.files.retrieve(file.id).bytes == len(png()),
            "content": CLIENT.files.content(file.id).content == png(),
            "seen as the image itself": by_file.choices[0].message.content == whole.choices[0].message.content,
            "deleted": CLIENT.files.delete(file.id).deleted,
        }

    tell("files", "image", upload)


def documents() -> None:
    """Only semel takes PDFs."""
    url = f"data:application/pdf;base64,{pdf_base64()}"
    question = {"type": "text", "text": QUESTION}

    def chat(**file: Any) -> Any:
        return CLIENT.chat.completions.create(**CHAT, messages=user([{"type": "file", "file": file}, question]))

    def respond(**file: Any) -> Any:
        content = [{"type": "input_file", **file}, {"type": "input_text", "text": QUESTION}]
        return CLIENT.responses.create(**RESPONSE, input=user(content))

    def ask() -> Any:
        file = CLIENT.files.create(file=("two.pdf", base64.b64decode(pdf_base64())), purpose="user_data")
        whole = chat(filename="two.pdf", file_data=url).choices[0].message.content
        return {
            "chat by id": chat(file_id=file.id).choices[0].message.content == whole,
            "responses": respond(filename="two.pdf", file_data=url).output_text == whole,
            "responses by id": respond(file_id=file.id).output_text == whole,
            "one page": bool(chat(file_data=url, page_range="2", dpi=100).choices[0].message.content),
            "deleted": CLIENT.files.delete(file.id).deleted,
        }

    tell("documents", "image", ask)


def stored() -> None:
    """Only semel keeps them beyond one process: a turn is sent alone, and is as if all had been sent."""

    def continued() -> Any:
        create = CLIENT.responses.create
        first_input = user([{"type": "input_image", "image_url": data_url(), "detail": "auto"}])
        first = create(**RESPONSE, input=first_input)
        turn = create(**RESPONSE, input=user(TEXT), previous_response_id=first.id)
        output = [item.to_dict() for item in first.output]
        whole = create(**RESPONSE, input=[*first_input, *output, *user(TEXT)], store=False)
        items = [item.id for item in CLIENT.responses.input_items.list(turn.id, limit=1, order="asc")]
        retrieved = CLIENT.responses.retrieve(turn.id)
        CLIENT.responses.delete(turn.id)
        return {
            "answered as if all was sent": turn.output_text == whole.output_text,
            "prompted as if all was sent": turn.usage.input_tokens == whole.usage.input_tokens,
            "retrieved": retrieved.to_dict() == turn.to_dict(),
            "items": len(set(items)) == len(items) == 2 + len(output),
        }

    tell("stored responses", "image", continued)


if __name__ == "__main__":
    chats()
    responses()
    files()
    documents()
    stored()
