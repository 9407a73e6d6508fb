"""`openai-agents`: agents that speak `/v1/responses`, as they do by default, and `/v1/chat/completions`."""

import asyncio
from dataclasses import asdict
from typing import Any, Literal

import agents
from driver import LONG, QUESTION, TEXT, TOKENS, data_url, plain, server, tell, user
from openai import AsyncOpenAI
from pydantic import BaseModel

SERVER = server()
RUNNER = asyncio.Runner()  # the client's connections belong to one loop
agents.set_tracing_disabled(True)


class Place(BaseModel):
    city: Literal["Oslo", "Rome"]


@agents.function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather."""
    return f"rain in {city}"


def run(model: Any, content: Any, tokens: int = TOKENS, *, stream: bool = False, **options: Any) -> Any:
    """What an agent makes of its input, and every response that it got."""
    choice, parallel = ("required", False) if "tools" in options else (None, None)
    settings = agents.ModelSettings(
        temperature=0, max_tokens=tokens, tool_choice=choice, parallel_tool_calls=parallel, include_usage=True
    )
    agent = agents.Agent(name="clerk", instructions="Be brief.", model=model, model_settings=settings, **options)

    async def ask() -> Any:
        if not stream:
            return await agents.Runner.run(agent, content, max_turns=2)
        running = agents.Runner.run_streamed(agent, content, max_turns=2)
        async for _ in running.stream_events():
            pass
        return running

    found = RUNNER.run(ask())
    responses = [{"output": plain(one.output), "usage": plain(asdict(one.usage))} for one in found.raw_responses]
    return {"final": plain(found.final_output), "responses": responses}


def main() -> None:
    for api, kind in (("responses", agents.OpenAIResponsesModel), ("chat", agents.OpenAIChatCompletionsModel)):
        client = AsyncOpenAI(base_url=SERVER.v1, api_key="none", max_retries=0, timeout=120)
        model = kind(model=SERVER.model, openai_client=client)
        parts = [
            {"type": "input_image", "image_url": data_url(), "detail": "auto"},
            {"type": "input_text", "text": QUESTION},
        ]
        # With /v1/responses an agent fails if an answer is cut, so its answers are objects, which end by themselves.
        form = {"tokens": LONG, "output_type": Place} if api == "responses" else {}
        tell(api, "text", lambda: run(model, TEXT, **form))  # noqa: B023  # called at once
        tell(api, "image", lambda: run(model, user(parts), **form))  # noqa: B023
        tell(api, "stream", lambda: run(model, TEXT, LONG, stream=True, output_type=Place))  # noqa: B023
        call = {"tools": [weather], "tool_use_behavior": "stop_on_first_tool"}
        tell(api, "tools", lambda: run(model, TEXT, LONG, **call))  # noqa: B023
        tell(api, "structured", lambda: run(model, TEXT, LONG, output_type=Place))  # noqa: B023
        if api == "responses":
            tell("stored responses", "image", lambda: stored(model))  # noqa: B023


def stored(model: Any) -> Any:
    """An agent that sends each turn alone, and one that sends all of them."""
    settings = agents.ModelSettings(temperature=0, max_tokens=LONG)
    agent = agents.Agent(
        name="clerk", instructions="Be brief.", model=model, model_settings=settings, output_type=Place
    )
    parts = [{"type": "input_image", "image_url": data_url(), "detail": "auto"}]

    async def ask() -> Any:
        first = await agents.Runner.run(agent, user(parts))
        turn = await agents.Runner.run(agent, TEXT, previous_response_id=first.last_response_id)
        whole = await agents.Runner.run(agent, [*first.to_input_list(), *user(TEXT)])
        prompts = [one.raw_responses[-1].usage.input_tokens for one in (turn, whole)]
        return {
            "answered as if all was sent": turn.final_output == whole.final_output,
            "prompted as if all was sent": prompts[0] == prompts[1] > first.raw_responses[-1].usage.input_tokens,
        }

    return RUNNER.run(ask())


if __name__ == "__main__":
    main()
