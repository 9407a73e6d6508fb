"""The settings of `semel batch`. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from semel.core.flag import REQUIRED, Group, flag

__all__ = ["BatchSettings"]


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The settings of `semel batch`, besides the flags of a server of its own."""

    GROUP: ClassVar[Group] = "Batch"

    input: Path = flag(REQUIRED, help="OpenAI's batch file: a request in each line.", is_positional=True)
    output: Path = flag(
        REQUIRED, help="The file of results, one line for each request; it is continued.", is_positional=True
    )
    model: str | None = flag(
        None,
        help="Start `semel serve` for this model and this batch; the flags that follow are its own.",
        is_positional=True,
    )
    base_url: str | None = flag(
        None, help="URL of the server, with or without /v1.", default_text="http://127.0.0.1:8000"
    )
    api_key: str | None = flag(
        None, help="API key of that server.", is_secret=True, default_text="VLLM_API_KEY or OPENAI_API_KEY"
    )
    concurrency: int = flag(64, help="Number of requests in flight.", min=1, max=1_000)
    retry_s: float = flag(
        600.0,
        help="Seconds after which a request that is answered with 429, 502 or 503, or not at all, is given up.",
        unit="seconds",
        min=0,
    )
    retry_errors: bool = flag(
        False, help="Send the lines again whose result in the file has an error or another status than 200."
    )
    allowed_local_media_path: Path | None = flag(
        None, help="Folder on this machine whose files lines may name as `file:///…`; the server gets their bytes."
    )
