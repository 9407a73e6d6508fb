"""The worker processes' side of the embedding tier: copies between encoder outputs and the host's memory.

`HostCopies` is for engines on a CPU: a file in memory that all worker processes of the engine map, and copies that are
over before the step goes on. `DeviceCopies` is for GPUs, where vLLM's own worker of its `ECCPUConnector` does them, on
streams next to the step, to and from memory of its own, which the embedding process maps too (`TierPage.announce`).
Every worker process has every output, so one of them saves, and all of them load.

A load cannot fail: the scheduler plans one only for an output of which this side has said that it is there, whole. An
output that has another shape than was expected is not saved.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final, Protocol, Self

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata
from vllm.platforms import current_platform

from semel.core import FORM_DTYPES, Form
from semel.encoder.extents import Extent
from semel.encoder.transfers import Load, Report, Save, Saved, Step
from semel.engine.vllm.tier.config import TierConfig, tier_ranks
from semel.engine.vllm.tier.page import TierPage
from semel.engine.vllm.tier.shared_file import open_file
from semel.errors import ConfigError

__all__ = [
    "Copies",
    "DeviceCopies",
    "HostCopies",
    "RankReport",
    "StepMetadata",
    "TierReports",
    "create_copies",
    "map_region",
]

_DTYPES: Final = {name: getattr(torch, name.removeprefix("torch.")) for name in FORM_DTYPES}


@dataclass(frozen=True, slots=True)
class StepMetadata(ECConnectorMetadata):  # type: ignore[misc]
    """The copies of a step, on their way to the worker processes."""

    step: Step


@dataclass(frozen=True, slots=True)
class RankReport:
    """The copies that one worker process has made in a step."""

    report: Report
    copied: Counter[str]
    """Bytes and nanoseconds, under the names of `EncoderTotals`."""
    row_bytes: int = 0
    """Bytes of an embedding, if an output did not fit what was expected; else 0."""
    has_new_weights: bool = False
    """True if everything that was saved before is of other weights."""


@dataclass(slots=True)
class TierReports(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """The reports of one step, of as many worker processes as have come together."""

    reports: list[RankReport]

    def aggregate(self, other: Any) -> TierReports:
        """Add those of another worker process. vLLM calls this."""
        return TierReports([*self.reports, *other.reports])


class Copies(Protocol):
    """The copies that a worker process makes for the tier."""

    def load(self, step: Step, encoder_cache: MutableMapping[str, torch.Tensor]) -> None:
        """Load what a step needs, before it needs it."""

    def save(self, step: Step, key: str, output: torch.Tensor) -> None:
        """Save an output, if the step has a slot for it."""

    def forget(self) -> None:
        """Report new weights with the next report."""

    def report(self, step: Step) -> RankReport | None:
        """Return what was done since the last report; None if that is nothing."""

    def close(self) -> None:
        """Let go of the memory."""


@dataclass(slots=True)
class _Done:
    """The copies since the last report."""

    saved: list[Saved] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    copied: Counter[str] = field(default_factory=Counter)
    row_bytes: int = 0
    has_new_weights: bool = False

    def count(self, kind: str, nbytes: int, elapsed_ns: int = 0) -> None:
        self.copied.update({f"tier_{kind}_{unit}": count for unit, count in (("bytes", nbytes), ("ns", elapsed_ns))})

    def count_load(self, load: Load, nbytes: int, elapsed_ns: int = 0) -> None:
        self.count("prefetched" if load.is_prefetched else "load", nbytes, elapsed_ns)

    def report(self, rank: int, closed: int) -> RankReport:
        report = Report(rank, closed, tuple(self.saved), tuple(self.loaded))
        return RankReport(report, self.copied, self.row_bytes, self.has_new_weights)


class HostCopies:
    """Copies within the step, over memory that the worker processes of one host share."""

    def __init__(self, memory: torch.Tensor, block_bytes: int, rank: int) -> None:
        self._memory = memory
        self._block_bytes = block_bytes
        self._rank = rank
        self._done = _Done()

    def load(self, step: Step, encoder_cache: MutableMapping[str, torch.Tensor]) -> None:
        """See `Copies`."""
        for key, load in step.loads.items():
            started_ns = perf_counter_ns()
            encoder_cache[str(key)] = output = self._loaded(load)
            self._done.loaded.append(load.transfer)
            self._done.count_load(load, output.nbytes, perf_counter_ns() - started_ns)
            if load.is_prefetched:  # who asks for it next finds it in the host cache
                self.save(step, str(key), output)

    def save(self, step: Step, key: str, output: torch.Tensor) -> None:
        """See `Copies`."""
        save = step.saves.get(key)
        if save is None or self._rank != 0:
            return
        started_ns = perf_counter_ns()
        if not _is_expected(save, output):
            return
        if output.nbytes > self._block_bytes * sum(count for _, count in save.extents):
            self._done.row_bytes = output.nbytes // max(len(output), 1)
            return
        content = output.detach().contiguous().view(torch.uint8).view(-1)
        start = 0
        for place in self._places(save.extents):
            count = min(len(place), len(content) - start)
            place[:count].copy_(content[start : start + count])
            start += count
        self._done.saved.append(Saved(save.transfer, _form(output)))
        self._done.count("save", output.nbytes, perf_counter_ns() - started_ns)

    def forget(self) -> None:
        """See `Copies`."""
        self._done.has_new_weights = True

    def report(self, step: Step) -> RankReport | None:
        """See `Copies`."""
        if not step.number and not self._done.has_new_weights:
            return None
        done, self._done = self._done, _Done()
        return done.report(self._rank, step.number)

    def close(self) -> None:
        """See `Copies`."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _loaded(self, load: Load) -> torch.Tensor:
        form: Any = load.form
        rows, columns, dtype = form
        output = torch.empty((rows, columns), dtype=_DTYPES[dtype])
        content = output.view(torch.uint8).view(-1)
        start = 0
        for place in self._places(load.extents):
            count = min(len(place), len(content) - start)
            content[start : start + count].copy_(place[:count])
            start += count
        return output

    def _places(self, extents: tuple[Extent, ...]) -> Iterator[torch.Tensor]:
        for first, count in extents:
            yield self._memory[first * self._block_bytes : (first + count) * self._block_bytes]


class DeviceCopies:
    """Copies by vLLM's own worker, which go on during later steps: each is over when it says so.

    It enqueues loads before what reads them, and saves after what was loaded or encoded. So an output that was
    prefetched can be saved in the step that loads it.
    """

    def __init__(self, worker: Any, block_bytes: int, rank: int, dtype: torch.dtype) -> None:
        self._worker = worker
        self._block_bytes = block_bytes
        self._rank = rank
        self._dtype = dtype
        self._saving: dict[int, tuple[Form, int]] = {}
        self._steps: dict[int, int] = {}
        """The copies that are under way, in order, and the step of each."""
        self._step = self._closed = 0
        self._done = _Done()

    @classmethod
    def over(cls, worker: Any, vllm_config: Any, block_bytes: int) -> Self:
        """Return the copies of an `ECCPUWorker`, and say where its memory is if this worker process saves."""
        config = TierConfig.parse(vllm_config.ec_transfer_config.ec_connector_extra_config)
        if config.page is not None and worker._is_save_rank:
            TierPage.open(config.page).announce(worker._region._fd)
        return cls(worker, block_bytes, _rank(vllm_config), vllm_config.model_config.dtype)

    def load(self, step: Step, encoder_cache: MutableMapping[str, torch.Tensor]) -> None:
        """See `Copies`."""
        from vllm.distributed.ec_transfer.ec_connector.cpu.common import ECCPUConnectorMetadata

        if not step.loads:
            return
        loads = {}
        for key, load in step.loads.items():
            form: Any = load.form
            loads[str(key)] = (load.transfer, _blocks(load.extents), form[:2])
        self._worker.start_load_caches(encoder_cache, connector_metadata=ECCPUConnectorMetadata(loads=loads))
        for key, load in step.loads.items():
            self._steps[load.transfer] = step.number
            self._done.count_load(load, self._block_bytes * sum(count for _, count in load.extents))
            if load.is_prefetched:
                self.save(step, str(key), encoder_cache[str(key)])

    def save(self, step: Step, key: str, output: torch.Tensor) -> None:
        """See `Copies`. vLLM's worker reports a save by its key: here that is its number, which no other save has."""
        from vllm.distributed.ec_transfer.ec_connector.cpu.common import ECCPUConnectorMetadata

        save = step.saves.get(key)
        if save is None or not self._worker._is_save_rank:
            return
        if not _is_expected(save, output) or output.dtype != self._dtype:
            return
        if output.nbytes > self._block_bytes * sum(count for _, count in save.extents):
            self._done.row_bytes = output.nbytes // max(len(output), 1)
            return
        saves = {str(one.transfer): _blocks(one.extents) for one in step.saves.values()}
        name = str(save.transfer)
        self._saving[save.transfer] = _form(output), output.nbytes
        self._steps[save.transfer] = step.number
        self._worker.save_caches(
            {name: output.contiguous()}, name, connector_metadata=ECCPUConnectorMetadata(saves=saves)
        )

    def forget(self) -> None:
        """See `Copies`."""
        self._done.has_new_weights = True

    def report(self, step: Step) -> RankReport | None:
        """See `Copies`. A step is closed when its last copy has ended."""
        self._unlink()
        self._worker.flush_saves()
        ended = self._worker.build_connector_worker_meta()
        if ended is not None:
            for transfer in map(int, ended.completed_saves):
                form, nbytes = self._saving.pop(transfer)
                self._done.saved.append(Saved(transfer, form))
                self._done.count("save", nbytes)
            self._done.loaded += ended.completed_loads
            for transfer in (*map(int, ended.completed_saves), *ended.completed_loads):
                del self._steps[transfer]
        self._step = step.number or self._step
        closed = next(iter(self._steps.values()), self._step + 1) - 1
        if self._done == _Done() and closed == self._closed:
            return None
        done, self._done, self._closed = self._done, _Done(), closed
        return done.report(self._rank, closed)

    def close(self) -> None:
        """See `Copies`."""
        self._worker.shutdown()

    def _unlink(self) -> None:
        """Take the name away from memory that every worker process has mapped by its first step: nothing stays."""
        region = self._worker._region
        if region._is_creator:
            region._is_creator = False
            Path(region._mmap_path).unlink(missing_ok=True)


def create_copies(vllm_config: Any, block_bytes: int) -> Copies:
    """Return what a worker process of this engine copies with."""
    if not current_platform.is_cpu():
        from vllm.distributed.ec_transfer.ec_connector.cpu.worker import ECCPUWorker

        return DeviceCopies.over(ECCPUWorker(vllm_config), vllm_config, block_bytes)
    config = TierConfig.parse(vllm_config.ec_transfer_config.ec_connector_extra_config)
    if config.region is None:
        raise ConfigError('the embedding tier needs a file that all worker processes map: name it as "region"')
    memory = map_region(config.region, config.nbytes // block_bytes * block_bytes)
    return HostCopies(memory, block_bytes, _rank(vllm_config))


def map_region(path: str, nbytes: int) -> torch.Tensor:
    """Map the file at `path`. Its memory is there from the start: an engine should not end for want of it later."""
    descriptor = open_file(path, "the embedding tier")
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    except OSError as error:
        raise ConfigError(f"no memory for an embedding tier of {nbytes:,} bytes: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _rank(vllm_config: Any) -> int:
    """Return this worker process's number among those that copy. The first one saves, as in vLLM's connector."""
    parallel = vllm_config.parallel_config
    return int(parallel.rank % tier_ranks(parallel))


def _is_expected(save: Save, output: torch.Tensor) -> bool:
    """Return whether an output is what its slot was reserved for."""
    return output.dim() == 2 and len(output) == save.rows and str(output.dtype) in _DTYPES


def _form(output: torch.Tensor) -> Form:
    rows, columns = output.shape
    return rows, columns, str(output.dtype)


def _blocks(extents: tuple[Extent, ...]) -> list[int]:
    return [block for first, count in extents for block in range(first, first + count)]
