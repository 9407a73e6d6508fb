"""An engine for vLLM's protocol of weight transfer that runs anywhere: the weights are in a folder.

vLLM's own need GPUs or their network. `--worker-cls` with `FOLDER_WORKER` registers it in vLLM's worker processes, and
`--weight-transfer-config '{"backend": "folder"}'` chooses it. A step sends the name of a folder as `update_info`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from semel.engine.vllm.plugins.worker import LazyTransferWorker

__all__ = ["FOLDER_BACKEND", "FOLDER_WORKER", "FolderInit", "FolderTransfer", "FolderUpdate", "FolderWorker"]

FOLDER_BACKEND: Final = "folder"
FOLDER_WORKER: Final = f"{__name__}.FolderWorker"


@dataclass
class FolderInit(WeightTransferInitInfo):  # type: ignore[misc]
    """There is nothing to agree on."""


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Some of the weights."""

    folder: str
    """Of safetensors files, under the names of the checkpoint."""


class FolderTransfer(WeightTransferEngine[FolderInit, FolderUpdate]):  # type: ignore[misc]
    """The transfer, as vLLM's own over NCCL does it but for the way that the tensors come."""

    init_info_cls = FolderInit
    update_info_cls = FolderUpdate

    def init_transfer_engine(self, init_info: FolderInit) -> None:
        """Connect to nobody."""

    def start_weight_update(self) -> None:
        """Make the layers ready for weights of a checkpoint."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FolderUpdate) -> None:
        """Load the tensors of a folder."""
        self.model.load_weights(_tensors(Path(update_info.folder)))

    def finish_weight_update(self) -> None:
        """Make the layers ready to run."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Let go of nothing."""


class FolderWorker(LazyTransferWorker):
    """The worker of `semel worker`, which knows this engine."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model; vLLM makes its transfer engine then."""
        WeightTransferEngineFactory.register_engine(FOLDER_BACKEND, FolderTransfer)
        super().load_model(*args, **kwargs)


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.glob("*.safetensors")):
        yield from load_file(path).items()
