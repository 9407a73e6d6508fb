"""`litellm`: its providers `hosted_vllm`, and `anthropic` in front of `/v1/messages`."""

from typing import Any

import litellm
from driver import FORMAT, LONG, TEXT, TOKENS, TOOL, image_parts, server, tell, user

SERVER = server()


def complete(content: Any, tokens: int = TOKENS, provider: str = "hosted_vllm", **options: Any) -> Any:
    base = SERVER.url if provider == "anthropic" else SERVER.v1
    return litellm.completion(
        model=f"{provider}/{SERVER.model}",
        api_base=base,
        api_key="none",
        messages=user(content),
        temperature=0,
        max_tokens=tokens,
        num_retries=0,
        **options,
    )


def streamed(provider: str) -> Any:
    chunks = [*complete(TEXT, stream=True, stream_options={"include_usage": True}, provider=provider)]
    return litellm.stream_chunk_builder(chunks)


def main() -> None:
    for api, provider in (("chat", "hosted_vllm"), ("messages", "anthropic")):
        where = {"provider": provider}
        tell(api, "text", lambda: complete(TEXT, **where, metadata={"trace": "1"}, user="someone"))  # noqa: B023
        tell(api, "image", lambda: complete(image_parts(), **where))  # noqa: B023
        tell(api, "stream", lambda: streamed(provider))  # noqa: B023
        tell(api, "tools", lambda: complete(TEXT, LONG, tools=[TOOL], tool_choice="required", **where))  # noqa: B023
        tell(api, "structured", lambda: complete(TEXT, LONG, response_format=FORMAT, **where))  # noqa: B023


if __name__ == "__main__":
    main()
