"""vLLM's flags that are not its engine's: those of its HTTP server, and what semel does with each.

A row says whether semel takes a flag, maps it to one of its own, ignores it or refuses it, and why. A flag is ignored
only if no answer changes by it. The command line, the page for people who come from vLLM and the tests read this table;
a test compares it with the parser of every supported vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["ENGINE_FLAGS", "FORMER_FLAGS", "SERVER_FLAGS", "Handling", "ServerFlag", "server_flag"]

Handling = Literal["taken", "mapped", "ignored", "refused"]
Values = Literal["switch", "one", "several"]


@dataclass(frozen=True, slots=True)
class ServerFlag:
    """Some flags of vLLM's server that semel handles alike."""

    handling: Handling
    spellings: tuple[str, ...]
    note: str
    """The behaviour of semel, and what to do instead."""

    values: Values = "one"
    target: str = ""
    """The flag of semel that has its value, if it is mapped."""

    default: tuple[str, ...] = ()
    """Values under which vLLM does what semel does anyway: they are taken even if others are refused."""

    is_engines: bool = False
    """True if a worker takes it, next to its engine's flags; a frontend takes it otherwise."""


def _take(spellings: str, note: str, values: Values = "one", *, is_engines: bool = False) -> ServerFlag:
    return ServerFlag("taken", tuple(spellings.split()), note, values, is_engines=is_engines)


def _map(spellings: str, target: str, note: str) -> ServerFlag:
    return ServerFlag("mapped", tuple(spellings.split()), note, target=target)


def _ignore(spellings: str, note: str, values: Values = "one") -> ServerFlag:
    return ServerFlag("ignored", tuple(spellings.split()), note, values)


def _refuse(spellings: str, note: str, values: Values = "one", default: str = "") -> ServerFlag:
    return ServerFlag("refused", tuple(spellings.split()), note, values, default=tuple(default.split()))


SERVER_FLAGS: Final = (
    _take("--host --port", "the same; `--host` is 127.0.0.1 unless it is set"),
    _take(
        "--api-key",
        "the same, `VLLM_API_KEY` too; a key of less than 16 characters is taken with a warning. `--api-keys-file` "
        "has one line `TENANT KEY` for each key",
        "several",
    ),
    _take("--config", "the same; semel's own flags may be in the file too"),
    _take("--chat-template", "the same"),
    _take("--chat-template-content-format", "the same"),
    _take("--root-path", "the same: requests may have this prefix or not"),
    _take("--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers", "the same"),
    _take("--enable-ssl-refresh", "always on", "switch"),
    _take("--allowed-origins --allowed-methods --allowed-headers", "the same"),
    _take("--allow-credentials", "the same", "switch"),
    _take("--disable-uvicorn-access-log", "the same", "switch"),
    _take("--enable-auto-tool-choice", "the same", "switch", is_engines=True),
    _take("--tool-call-parser --tool-parser-plugin --tool-strict-level", "the same", is_engines=True),
    _take("--lora-modules", "the same", "several", is_engines=True),
    _map("--h11-max-incomplete-event-size", "--max-head-bytes", "`--max-head-bytes`"),
    _map("--h11-max-header-count", "--max-head-fields", "`--max-head-fields`"),
    _ignore("--api-server-count -asc", "preprocessing runs in `--preprocessing-processes`; more `semel frontend` "
             "processes may serve the same workers"),
    _ignore("--uvicorn-log-level", "semel's log has no levels to choose; `--disable-uvicorn-access-log` leaves out "
             "the line for each request"),
    _ignore("--disable-access-log-for-endpoints", "/health, /ready, /metrics and /ping are never logged"),
    _ignore("--enable-log-outputs --enable-log-deltas", "semel does not log prompts and answers", "switch"),
    _ignore("--max-log-len", "semel does not log prompts and answers"),
    _ignore("--log-error-stack", "the log has the stack of every error that is not the client's", "switch"),
    _ignore("--enable-prompt-tokens-details", "always on", "switch"),
    _ignore("--enable-request-id-headers", "always on", "switch"),
    _ignore("--enable-scale-out", "the render and generate routes are always there", "switch"),
    _ignore("--trust-request-mm-kwargs", "`mm_processor_kwargs` of a request are checked by name and bound instead "
             "of being trusted", "switch"),
    _ignore("--disable-fastapi-docs --enable-offline-docs", "there are no pages of documentation, only /openapi.json",
             "switch"),
    _ignore("--data-parallel-supervisor-port --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s "
             "--dp-supervisor-probe-failure-threshold", "`/ready` is that of the whole of `semel serve`"),
    _ignore("--enable-flash-late-interaction", "frontends compute the scores of late interaction", "switch"),
    _ignore("--cohere-is-reasoning-model", "for /cohere/v2/chat, which semel does not serve", "switch"),
    _ignore("--cohere-format", "for `--tokenizer-mode cohere`, which semel refuses"),
    _refuse("--default-chat-template-kwargs", "send `chat_template_kwargs` with each request, or write the value "
             "into a template for `--chat-template`", default="{}"),
    _refuse("--response-role", "answers are the assistant's: leave it out", default="assistant"),
    _refuse("--trust-request-chat-template", "a chat template from a client is never taken: name one with "
             "`--chat-template`", "switch"),
    _refuse("--return-tokens-as-token-ids", "send `return_tokens_as_token_ids` with each request", "switch"),
    _refuse("--enable-force-include-usage", 'send `"stream_options": {"include_usage": true}` with each request',
             "switch"),
    _refuse("--exclude-tools-when-tool-choice-none", "leave `tools` out of such requests", "switch"),
    _refuse("--tool-server", "semel runs no tools: run them in the client"),
    _refuse("--enable-per-request-metrics", "use traces (`--otlp-traces-endpoint`), or /metrics", "switch"),
    _refuse("--enable-server-load-tracking", "there is no /load: use /metrics", "switch"),
    _refuse("--enable-tokenizer-info-endpoint", "there is no /tokenizer_info: read the tokenizer's files", "switch"),
    _refuse("--sse-keep-alive-interval", "semel sends no comments in a stream: raise the proxy's read timeout",
             default="0"),
    _refuse("--anthropic-disabled-thinking-effort", "semel uses `none`: leave it out", default="auto none"),
    _refuse("--tokens-only", "all routes are always served: leave it out, and use /inference/v1/generate", "switch"),
    _refuse("--fingerprint-mode --fingerprint-value", "`system_fingerprint` is semel's own: leave it out",
             default="full hash"),
    _refuse("--uds", "semel listens at `--host` and `--port`: put a proxy with a socket before it"),
    _refuse("--middleware", "semel loads no code of others into its server: put a proxy before it"),
    _refuse("--grpc", "semel speaks HTTP: leave it out", "switch"),
    _refuse("--grpc-port", "semel speaks HTTP: leave it out"),
    _refuse("--headless", "start `semel worker` on this machine, and name it to the frontends", "switch"),
)  # fmt: skip
"""All that vLLM's server parser has besides its engine's flags."""

ENGINE_FLAGS: Final = (
    ServerFlag(
        "mapped",
        ("--data-parallel-size", "-dp"),
        "`--workers` of `semel serve`: each worker is a replica with caches of its own. With "
        "`--enable-expert-parallel` or a `--data-parallel-rank`, start one `semel worker` for each rank instead",
        target="--workers",
        is_engines=True,
    ),
    ServerFlag("refused", ("--default-mm-loras",), "name the adapter as `model` in each request", is_engines=True),
)
"""Flags of vLLM's engine that semel does not just pass on."""

FORMER_FLAGS: Final = (_ignore("--disable-log-requests", "requests are not logged by the engine", "switch"),)
"""Flags of earlier versions of vLLM that are still in people's scripts."""


def server_flag(spelling: str) -> ServerFlag | None:
    """Return the row of a flag, by one of its spellings with dashes; None if it is not in a table here."""
    return _ROWS.get(spelling)


_ROWS: Final = {spelling: row for row in (*SERVER_FLAGS, *ENGINE_FLAGS, *FORMER_FLAGS) for spelling in row.spellings}
