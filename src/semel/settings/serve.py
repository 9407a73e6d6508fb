"""Settings of `semel serve`: those of a frontend and of its workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from semel.core.flag import flag, same_flag, section
from semel.engine.progress import ProgressLimits
from semel.engine.vllm.grammars.limits import GrammarLimits
from semel.settings.frontend import FrontendSettings, ServingSettings, StartSettings
from semel.settings.worker import AdminSettings, EncoderSettings, TurnSettings
from semel.worker.session_settings import SessionSettings

__all__ = ["ServeSettings"]


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The settings of `semel serve`, besides vLLM's flags."""

    model: str = same_flag(FrontendSettings, "model")
    key_file: Path | None = flag(
        None, "fleet-key-file", help="File with the fleet key.", group="Keys", default_text="a new key for this run"
    )
    key_dir: Path | None = flag(
        None, help="Folder with the keys of both roles, of `semel key make`, instead of a fleet key.", group="Keys"
    )
    drain_delay_s: float = same_flag(FrontendSettings, "drain_delay_s", default=0.0)
    workers: int = flag(
        1,
        help="Number of workers. The GPUs of this machine, or without any its cores, are split among them.",
        group="Server",
        is_common=True,
        min=1,
    )
    verbose: bool = flag(
        False, help="At a terminal, show everything that the processes print while they start.", group="Server"
    )
    start: StartSettings = section(StartSettings)
    serving: ServingSettings = section(ServingSettings)
    admin: AdminSettings = section(AdminSettings)
    encoder: EncoderSettings = section(EncoderSettings)
    turns: TurnSettings = section(TurnSettings)
    grammars: GrammarLimits = section(GrammarLimits)
    progress: ProgressLimits = section(ProgressLimits)
    sessions: SessionSettings = section(SessionSettings)
