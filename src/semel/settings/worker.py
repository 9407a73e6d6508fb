"""Settings of a worker: what `semel worker` takes besides vLLM's flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from semel.cells.settings import CellSettings
from semel.core.flag import MAX_PORT, REQUIRED, flag, same_flag, section
from semel.embeddings.settings import EmbeddingStoreSettings
from semel.engine.progress import ProgressLimits
from semel.engine.vllm.grammars.limits import GrammarLimits
from semel.settings.frontend import (
    FrontendSettings,
    LogSettings,
    PreprocessingSettings,
    ServerSettings,
    ServingSettings,
    StartSettings,
)
from semel.worker.session_settings import SessionSettings

__all__ = ["AdminSettings", "EncoderSettings", "TurnSettings", "WorkerSettings"]


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """The admin address of a worker."""

    admin_port: int | None = flag(
        None,
        help="Serve metrics, probes, feature injection and cache reset on this port. The last two answer on 127.0.0.1 "
        "only.",
        group="Admin",
        is_common=True,
        min=0,
        max=MAX_PORT,
    )
    admin_key_file: Path | None = flag(
        None,
        help="File with the key for injection and reset, at least 16 printable characters. Without it, and without "
        "admin.key in --key-dir, the admin port serves metrics only.",
        group="Admin",
    )


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """The encoder and its caches in a worker's engine."""

    encoder_planning: bool = flag(
        False, help="Let semel schedule the encoder instead of vLLM's scheduler.", group="Encoder cache"
    )
    ship_resident_items: bool = flag(
        False,
        "disable-lazy-mm-transfer",
        help="Send image and audio data to the engine's processes even if it is already encoded there, as vLLM does.",
        group="Encoder cache",
    )
    encoder_cache_embeddings: int | None = flag(
        None,
        help="Size of the encoder cache on the engine's device, in embeddings. The worker logs the memory that "
        "it takes.",
        group="Encoder cache",
        is_common=True,
        min=1,
        default_text="vLLM's own: --max-num-batched-tokens",
    )
    embedding_tier_bytes: int = flag(
        0,
        "embedding-tier-gb",
        help="Host memory for encoder outputs that the device has no room for, in GiB; 0 turns it off.",
        group="Encoder cache",
        is_common=True,
        unit="GiB",
        min=0,
    )
    store: EmbeddingStoreSettings = section(EmbeddingStoreSettings)


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """The sharing of a worker's engine by tenants."""

    disable_tenant_turns: bool = flag(
        False,
        help="Pass requests to the engine in order of arrival instead of by fair queueing over tenants.",
        group="Worker",
    )


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of `semel worker`, besides vLLM's flags."""

    model: str = same_flag(FrontendSettings, "model")
    listen: str = flag(
        REQUIRED,
        help="Address to listen on: ipc:///DIRECTORY/NAME, or tcp://HOST:PORT (encrypted).",
        group="Fleet",
        is_common=True,
    )
    key_file: Path | None = same_flag(FrontendSettings, "key_file")
    key_dir: Path | None = same_flag(FrontendSettings, "key_dir")
    drain_delay_s: float = same_flag(FrontendSettings, "drain_delay_s")
    drain_s: float = same_flag(ServerSettings, "drain_s")
    processor: Literal["auto", "hf", "vllm"] = same_flag(PreprocessingSettings, "processor")
    trust_remote_code: bool = same_flag(PreprocessingSettings, "trust_remote_code")
    admin: AdminSettings = section(AdminSettings)
    metrics_host: str = same_flag(ServingSettings, "metrics_host")
    encoder: EncoderSettings = section(EncoderSettings)
    turns: TurnSettings = section(TurnSettings)
    grammars: GrammarLimits = section(GrammarLimits)
    progress: ProgressLimits = section(ProgressLimits)
    cell: CellSettings = section(CellSettings)
    sessions: SessionSettings = section(SessionSettings)
    logs: LogSettings = section(LogSettings)
    start: StartSettings = section(StartSettings)
