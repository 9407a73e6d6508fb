"""The inside of vLLM, where semel touches it: every function here knows names that vLLM promises to nobody.

They stand in one table (`names`), and are looked up before an engine loads (`versions`). Where the inside of vLLM's
item cache is not as semel knows it, nothing is said about what the engine holds.
"""

from __future__ import annotations

import asyncio
import glob
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from copy import copy
from pathlib import Path
from typing import Any, Final

from semel.engine.vllm.compat.versions import installed_version

__all__ = [
    "CORE_BINDING",
    "ENCODER_CACHE",
    "GUARDED_WORKER",
    "LAZY_TRANSFER_SCHEDULER",
    "LAZY_TRANSFER_WORKER",
    "LOGGING_CONFIG",
    "PLAIN_SCHEDULER",
    "SCHEDULER",
    "SOCKET_FOLDER",
    "SOCKET_NAME_CHARS",
    "add_validated",
    "communicator_segments",
    "copy_params",
    "core_pids",
    "default_worker",
    "drop_encoder_outputs",
    "dropped_rows",
    "encode_sample",
    "encoder_arguments",
    "encoder_runner",
    "find_mirror",
    "forget_prefix",
    "item_size",
    "num_embeds",
    "pause_after_large",
    "received_features",
    "row_generators",
    "runs_encoder",
    "show_items",
    "skip_grammar_checks",
    "takes_late_items",
    "takes_seeds",
    "unknown_contents",
    "watch_calls",
    "watch_removals",
    "watch_steps",
]

ENCODER_CACHE: Final = "semel.engine.vllm.plugins.encoder_cache.EncoderCache"
SCHEDULER: Final = "semel.engine.vllm.plugins.scheduler.create_scheduler"
LAZY_TRANSFER_SCHEDULER: Final = "semel.engine.vllm.plugins.scheduler.create_lazy_transfer_scheduler"
PLAIN_SCHEDULER: Final = "semel.engine.vllm.plugins.scheduler.create_plain_scheduler"
"""The same for plain vLLM with semel inside."""

LAZY_TRANSFER_WORKER: Final = "semel.engine.vllm.plugins.worker.LazyTransferWorker"
GUARDED_WORKER: Final = "semel.engine.vllm.plugins.worker.GuardedWorker"
"""The same without lazy transfer."""

CORE_BINDING: Final = "VLLM_CPU_OMP_THREADS_BIND"
"""The variable that says to which cores each process of an engine is bound: `0-3|4-7`, `auto` or `nobind`."""

LOGGING_CONFIG: Final = "VLLM_LOGGING_CONFIG_PATH"
"""The environment variable that names a file with a configuration for the logs of vLLM's processes."""

SOCKET_FOLDER: Final = "VLLM_RPC_BASE_PATH"
"""The environment variable that says where vLLM's processes put the sockets between them."""

SOCKET_NAME_CHARS: Final = 37
"""Characters that vLLM adds to that folder: a slash and a UUID."""

_COLLECTIVE: Final = "collective_rpc"
_MIRRORED: Final = "LruKeyReplicatedSenderCache"
_SHARED: Final = "ShmObjectStoreSenderCache"
_ABORT_AT_ONCE: Final = "abort_immediately"
_MIRROR_PARTS: Final = ("_on_remove", "clear", "maxsize")

_FIRST_RUNNER: Final = ("_execute_mm_encoder", "_cache_encoder_output", "encoder_cache", "requests", "mm_budget")
"""Names of vLLM's first model runner that the guard of the encoder's outputs needs."""

_SECOND_RUNNER: Final = ("prepare_mm_inputs", "execute_mm_encoder", "encoder_cache", "model", "device")
"""And of the second one: of `model_state.encoder_runner`, which is there when the model is loaded."""

_ENCODER_BOOKS: Final = ("cached", "freeable", "freed", "num_embeds_by_hash", "num_free_slots")

_ENGINE_NAME: Final = "VLLM_DIST_IDENT"
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - where the system has it
_SEGMENT: Final = re.compile(r"-\[([0-9-]+)\]-cpushm_([0-9]+)$")
"""The ranks of a group, and the place among them of the process that made the segment."""

logger = logging.getLogger(__name__)


def encoder_arguments(
    settings: Mapping[str, Any] | None = None, *, with_scheduler: bool = False, with_lazy_transfer: bool = False
) -> dict[str, Any]:
    """Return engine arguments that plug semel's encoder cache into vLLM; with planning and lazy transfer as asked."""
    arguments: dict[str, Any] = {
        "ec_manager_config": {"encoder_cache_manager_cls": ENCODER_CACHE, "manager_config": dict(settings or {})}
    }
    if with_lazy_transfer:
        arguments |= {"scheduler_cls": LAZY_TRANSFER_SCHEDULER, "worker_cls": LAZY_TRANSFER_WORKER}
    if with_scheduler:
        arguments["scheduler_cls"] = SCHEDULER
    return arguments


def takes_late_items(platform: Any) -> bool:
    """Return whether semel's worker is the one that vLLM uses on a platform, with late items in it."""
    return bool(platform.is_cpu() or platform.is_cuda_alike())


def default_worker(platform: Any) -> str:
    """Return the name of the worker that vLLM uses on a platform, if nobody names one."""
    return "vllm.v1.worker.cpu_worker.CPUWorker" if platform.is_cpu() else "vllm.v1.worker.gpu_worker.Worker"


def received_features(worker: Any, request_id: str) -> list[Any]:
    """Return a request's items in a worker process, from which its model runner takes what it encodes."""
    runner = worker.model_runner
    known = runner.encoder_cache if worker.use_v2_model_runner else runner.requests[request_id]
    features: Any = known.mm_features
    return features[request_id] if worker.use_v2_model_runner else features  # type: ignore[no-any-return]


def num_embeds(feature: Any) -> int:
    """Return the embeddings that an item has room for in its prompt.

    vLLM's own count costs 3 µs on first use, also where there is no mask to count.
    """
    place = feature.mm_position
    return int(place.length if place.is_embed is None else place.get_num_embeds())


def runs_encoder(worker: Any) -> bool:
    """Return whether the encoder of a worker process runs as semel knows it; if not, a warning says what is missing."""
    runner, names = worker.model_runner, _FIRST_RUNNER
    if worker.use_v2_model_runner:
        if not getattr(runner, "supports_mm_inputs", True):
            return False  # there is nothing to guard
        runner, names = encoder_runner(worker), _SECOND_RUNNER
    if not (unknown := [name for name in names if not hasattr(runner, name)]):
        return True
    logger.warning(
        "an item whose encoder output does not fit its place would end this engine: "
        "vLLM %s has no %s in its model runner",
        installed_version(),
        ", ".join(unknown),
    )
    return False


def encoder_runner(worker: Any) -> Any:
    """Return what runs the encoder of a worker process with vLLM's second model runner, once its model is loaded."""
    return getattr(worker.model_runner.model_state, "encoder_runner", None)


def encode_sample(runner: Any, modality: str) -> Any:
    """Return the encoder's output for a small item of vLLM's own making."""
    from vllm.config.multimodal import AudioDummyOptions, ImageDummyOptions, VideoDummyOptions
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing.context import TimingContext
    from vllm.multimodal.utils import group_and_batch_mm_kwargs

    sizes = {
        "image": ImageDummyOptions(width=112, height=112),
        "video": VideoDummyOptions(num_frames=4, width=112, height=112),
        "audio": AudioDummyOptions(length=16_000),
    }
    budget = getattr(runner, "mm_budget", None)  # the second model runner has none
    processor = MULTIMODAL_REGISTRY.create_processor(runner.model_config) if budget is None else budget.processor
    inputs = processor.get_dummy_inputs(seq_len=4_096, mm_counts={modality: 1}, mm_options=sizes)
    item = processor.apply(inputs, timing_ctx=TimingContext(enabled=False))["mm_kwargs"][modality][0]
    _, _, batch = next(group_and_batch_mm_kwargs([(modality, item)], device=runner.device))
    return runner.model.embed_multimodal(**batch)[0]


def forget_prefix(scheduler: Any, request_id: str, start: int) -> None:
    """Take a request's KV blocks out of the prefix cache, from the one on that has the token at `start`."""
    manager = scheduler.kv_cache_manager
    sizes = [group.block_size for group in manager.coordinator.single_type_managers]
    blocks = zip(manager.get_block_ids(request_id), sizes, strict=True)
    manager.evict_blocks({block for ids, size in blocks for block in ids[start // size :]})


def drop_encoder_outputs(manager: Any, identifiers: Iterable[str]) -> None:
    """Let vLLM's own encoder cache manager drop outputs that no request refers to."""
    if unknown := [name for name in _ENCODER_BOOKS if not hasattr(manager, name)]:
        logger.warning(
            "%s has no %s: a wrong encoder output stays in its cache until it is evicted",
            type(manager).__name__,
            ", ".join(unknown),
        )
        return
    for identifier in identifiers:
        if (size := manager.freeable.pop(identifier, None)) is not None:
            del manager.cached[identifier]
            manager.num_embeds_by_hash.pop(identifier, None)
            manager.num_free_slots += size
            manager.freed.append(identifier)


def row_generators(worker: Any) -> dict[int, Any]:
    """Return the random generators of the seeded requests in a batch of vLLM's first model runner, by row."""
    generators: dict[int, Any] = worker.model_runner.input_batch.generators
    return generators


def dropped_rows(worker: Any) -> list[int]:
    """Return the rows of a step whose sampled token is dropped; of the first model runner."""
    runner = worker.model_runner
    rows: list[int] = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
    return rows


def takes_seeds(config: Any) -> bool:
    """Return whether an engine of this `VllmConfig` outlives a seeded request whose prompt is computed in chunks.

    On a CPU, vLLM's first model runner does not without semel's workers (`worker`).
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or config.use_v2_model_runner:
        return True
    return config.parallel_config.worker_cls in (LAZY_TRANSFER_WORKER, GUARDED_WORKER)


def find_mirror(sender: Any) -> Any | None:
    """Return the names and sizes by which vLLM's item cache in this process evicts as the one in its engine core does.

    None if the cache is off or of a kind that has no mirror (`shm`), or if this vLLM's is not as semel knows it.
    """
    from vllm.v1.engine import EngineCoreRequest

    if type(sender).__name__ != _MIRRORED:
        return None
    mirror = getattr(sender, "_cache", None)
    unknown = [part for part in _MIRROR_PARTS if not hasattr(mirror, part)]
    unknown += [part for part in (_ABORT_AT_ONCE,) if part not in EngineCoreRequest.__struct_fields__]
    if not unknown:
        return mirror
    logger.warning(
        "vLLM %s has no %s in its item cache: what the engine holds is not known, every repeat travels with its data",
        installed_version(),
        ", ".join(unknown),
    )
    return None


def unknown_contents(sender: Any) -> str:
    """Say why the contents of an item cache without a mirror are unknown, and what to do."""
    if type(sender).__name__ == _SHARED:
        return (
            "with --mm-processor-cache-type shm nobody is told what the engine's item cache holds, so no request could "
            "refer to an injected item: start the worker with lru, vLLM's default"
        )
    return f"what the engine's item cache ({type(sender).__name__}) holds is not known with vLLM {installed_version()}"


def watch_removals(mirror: Any, removed: Callable[[str], None]) -> None:
    """Call `removed` with the name of every item that leaves the mirror, for whatever reason."""
    mirror._on_remove = lambda name, _: removed(name)


def item_size(item: Any) -> int:
    """Return the bytes that vLLM's item cache charges for an item."""
    from vllm.multimodal.cache.base import MultiModalCache

    return int(MultiModalCache.get_item_size(item))


def copy_params(params: Any) -> Any:
    """Copy sampling parameters that several requests share: for each, vLLM adds the end of its answer to them."""
    copied = copy(params)
    copied._all_stop_token_ids = set(params._all_stop_token_ids)
    return copied


def skip_grammar_checks(params: Any) -> None:
    """Let vLLM's checks of sampling parameters leave out the grammar, which they would convert each time.

    Where vLLM has no such step, nothing is changed but the time that it takes.
    """
    params._validate_structured_outputs = _pass_all


def _pass_all(*_: object) -> None:
    """Find nothing wrong."""


async def show_items(llm: Any, request: Any) -> None:
    """Let the engine core take a request's items into its cache, and drop the request before it is scheduled."""
    setattr(request, _ABORT_AT_ONCE, True)
    llm.input_processor.assign_request_id(request)
    await llm.engine_core.add_request_async(request)


async def add_validated(llm: Any, request: Any, params: Any, options: Mapping[str, Any]) -> Any:
    """Add a request that vLLM has made of its input and checked; returns its collector.

    vLLM calls this way deprecated. Its other one would make and check the request once more, which takes 110 µs, and 28
    for each item.
    """
    logging.getLogger(type(llm).__module__).addFilter(_is_not_about_validated)
    further = {name: value for name, value in options.items() if name not in ("trace_headers", "priority")}
    return await llm.add_request(request.request_id, request, params, **further)


def _is_not_about_validated(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Passing EngineCoreRequest")


def pause_after_large(llm: Any, items: int) -> None:
    """Give the event loop a turn after each message to the engine core with more items than that.

    Of a request with several answers vLLM sends one message for each, and never waits between them.
    """
    client = llm.engine_core
    add = client.add_request_async

    async def add_request_async(request: Any) -> None:
        await add(request)
        if len(request.mm_features or ()) > items:
            await asyncio.sleep(0)

    client.add_request_async = add_request_async


def watch_steps(llm: Any, on_step: Callable[[], None], on_outputs: Callable[[], None]) -> bool:
    """Call `on_step` for every step of the engine core, and `on_outputs` when its outputs have been handed out.

    False if this engine does not report all of its steps: one that generates nothing, such as a chunk of a prompt, is
    reported by its statistics only.
    """
    client = llm.engine_core
    if not getattr(llm, "log_stats", False):
        logger.warning("without the engine's statistics (--disable-log-stats) a hung engine is not noticed")
        return False
    if not hasattr(client, "get_output_async"):
        logger.warning("vLLM %s does not tell of its steps: a hung engine is not noticed", installed_version())
        return False
    get_output = client.get_output_async

    async def get_output_async() -> Any:
        on_outputs()
        outputs = await get_output()
        on_step()
        return outputs

    client.get_output_async = get_output_async
    return True


def watch_calls(llm: Any, during: Callable[[str], AbstractContextManager[Callable[[Any], None]]]) -> None:
    """Enter `during` for every call into the engine core, by the method's name; it is passed what the call returns.

    Of a call into the worker processes the name is `collective_rpc.` and that of the method there.
    """
    client = llm.engine_core
    call: Callable[..., Awaitable[Any]] | None = getattr(client, "_call_utility_async", None)
    if call is None:
        logger.warning("vLLM %s does not tell of pauses: they count as time without a step", installed_version())
        return

    async def call_utility_async(method: str, *args: Any, **kwargs: Any) -> Any:
        name = f"{method}.{args[0]}" if method == _COLLECTIVE and args else method
        with during(name) as on_result:
            result = await call(method, *args, **kwargs)
            on_result(result)
            return result

    client._call_utility_async = call_utility_async


def communicator_segments(rank: int) -> Iterator[Path]:
    """Yield the shared memory that vLLM's communicator between CPU workers has made in the worker process of this rank.

    Its name begins with one that vLLM makes for each engine. Every process makes one segment per group, and has waited
    for the others of the group to map it when its device is ready.
    """
    engine = os.environ.get(_ENGINE_NAME)
    for segment in _SHARED_MEMORY.glob(f"{glob.escape(engine)}-*") if engine else ():
        if (found := _SEGMENT.search(segment.name)) is not None:
            ranks, place = found[1].split("-"), int(found[2])
            if place < len(ranks) and ranks[place] == str(rank):
                yield segment


def core_pids(llm: Any) -> list[int]:
    """Return the processes of the engine core on this host; none if it is elsewhere."""
    manager = getattr(getattr(llm.engine_core, "resources", None), "engine_manager", None)
    return [process.pid for process in getattr(manager, "processes", ()) if process.pid is not None]
