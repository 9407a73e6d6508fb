"""The LoRA adapters of a running vLLM, known by their content.

vLLM keeps prefixes by an adapter's name and path, and its weights by a number. Here a name goes to vLLM with a hash of
the adapter's files, and each of these names has a number of its own: other weights under a known name are another
adapter for vLLM, next to the one that running requests go on with, and the same weights are the same one wherever they
lie.

Encoder outputs are those of the model for all adapters that change its language model only. One that changes the
encoder (`--enable-tower-connector-lora`) has its own, by its content.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from semel.core import MAX_ADAPTER_NAME_CHARS, Adapter, AdapterChange, LatestChanges
from semel.engine.vllm.compat.names import to_release
from semel.engine.vllm.compat.versions import TESTED, installed_version
from semel.engine.vllm.requests.stream import failures
from semel.errors import ConfigError, EngineFailed, InvalidRequest, ModelNotFound, SemelError

__all__ = ["VllmAdapters", "check_adapters", "hash_adapter", "is_for_language_only", "tower_class"]

_SINCE: Final = "0.32"
"""The first release with whose adapters semel was tested."""

_HASH_BYTES: Final = 16
_NAME_HEX: Final = 16

logger = logging.getLogger(__name__)


def check_adapters(config: Any) -> None:
    """Refuse adapters that may change what the encoder makes of an item where all requests share its outputs."""
    if (lora := config.lora_config) is None:
        return
    if to_release(version := installed_version()) in TESTED[: TESTED.index(_SINCE)]:
        raise ConfigError(f"--enable-lora needs vLLM {_SINCE}, and {version} is installed")
    if lora.enable_tower_connector_lora and config.ec_transfer_config is not None:
        raise ConfigError(
            "--enable-tower-connector-lora was not tested with --embedding-tier-gb: leave one of the two out"
        )
    if lora.default_mm_loras:
        raise ConfigError("--default-mm-loras: semel chooses no adapter by modality; name it as `model` in requests")
    if config.model_config.is_multimodal_model:
        from vllm.model_executor.model_loader import get_model_architecture

        if not hasattr(get_model_architecture(config.model_config)[0], "get_mm_mapping"):
            raise ConfigError(
                "--enable-lora: vLLM does not say where this model's encoder ends, so an adapter could change its "
                "outputs, which semel shares between adapters; merge the adapter into the model"
            )


def tower_class(config: Any) -> Any:
    """Return vLLM's class of a model whose adapters may change its encoder; None of another."""
    if not config.lora_config.enable_tower_connector_lora:
        return None
    from vllm.model_executor.model_loader import get_model_architecture

    return get_model_architecture(config.model_config)[0]


def is_for_language_only(folder: Path, model: Any) -> bool:
    """Return whether an adapter has weights for the language model of a vLLM class and, surely, for nothing else."""
    from safetensors import SafetensorError, safe_open
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renames = None if mapper is None else mapper.get_rename_mapper()
    try:
        (prefix,) = model.get_mm_mapping(None).language_model
        with safe_open(folder / "adapter_model.safetensors", "numpy") as tensors:
            return all(
                parse_fine_tuned_lora_name(name, renames)[0].startswith(prefix) for name in tensors.offset_keys()
            )
    except (OSError, SafetensorError, ValueError, AttributeError, TypeError) as error:
        logger.info("%s may change the encoder: what it has weights for cannot be read: %r", folder, error)
        return False


def hash_adapter(folder: Path) -> str:
    """Hash the files of an adapter with their names. It reads all of them: keep it off the event loop."""
    hashed = blake3(b"semel.adapter.1")
    for path in sorted(one for one in folder.iterdir() if one.is_file()):
        hashed.update(blake3(path.name.encode()).digest() + blake3().update_mmap(path).digest())
    return hashed.hexdigest(length=_HASH_BYTES)


class VllmAdapters:
    """The adapters of one engine. `names` are those of its model, which no adapter may have.

    With a `tower`, which is vLLM's class of the model, they may change its encoder: vLLM keeps what is encoded under
    an item's name with that of the adapter before it, and here without that if the adapter is for the language model.
    """

    def __init__(self, llm: Any, names: Sequence[str], *, tower: Any = None) -> None:
        self._llm = llm
        self._names = names
        self._loaded: dict[str, tuple[Adapter, Any]] = {}
        self._numbers: dict[str, int] = {}
        """By the names that go to vLLM. It keeps them in 32 bits, too few for a hash."""
        self._tower = tower
        self._for_language_only: set[str] = set()  # names that go to vLLM
        if tower is not None:
            identify = llm.input_processor._get_mm_identifier
            llm.input_processor._get_mm_identifier = partial(self._identify, identify)
        self._order = asyncio.Lock()
        self.changes = LatestChanges()
        self.watchers: list[Callable[[], None]] = []

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """All of them."""
        return tuple(adapter for adapter, _ in self._loaded.values())

    def request(self, name: str) -> Any:
        """Return vLLM's `LoRARequest` for the adapter with this name."""
        if (found := self._loaded.get(name)) is None:
            raise ModelNotFound.of("model", f"the worker has no adapter {name!r} any more")
        return found[1]

    async def load_modules(self, modules: Sequence[Any]) -> None:
        """Load those of the command line, which other workers need not have; a `ConfigError` names a wrong one."""
        for one in modules:
            try:
                self._check(one.name, one.path)
                folder = await asyncio.to_thread(_find, one.path)
                is_3d_weight, parent = one.is_3d_lora_weight, one.base_model_name
                await self._load(one.name, one.path, folder, is_3d_weight=is_3d_weight, parent=parent)
            except SemelError as error:
                raise ConfigError(f"--lora-modules {one.name}={one.path}: {error}") from error
        self._tell()

    async def load(self, name: str, path: str, *, in_place: bool = False, is_3d_weight: bool = False) -> None:
        """Load an adapter. `in_place` lets it replace one with its name, for requests that come from now on."""
        async with self._order:
            self._check(name, path, in_place=in_place)
            folder = await asyncio.to_thread(_find, path)
            content = await self._load(name, path, folder, is_3d_weight=is_3d_weight)
            self.changes.note(AdapterChange(name, self._now(name), path, content, is_3d_weight))
            self._tell()

    async def unload(self, name: str) -> None:
        """Take no more requests for an adapter. Those that run go on; vLLM drops its weights when it needs the room."""
        async with self._order:
            last = self.changes.get(name)  # it may be loaded at other workers, and be impossible here
            if name not in self._loaded and not (last is not None and last.content):
                raise ModelNotFound.of("lora_name", f"The lora adapter '{name}' cannot be found.")
            self._unload(name)
            self.changes.note(AdapterChange(name, self._now(name)))
            self._tell()

    async def follow(self, change: AdapterChange) -> None:
        """Do what an operator asked another worker for, unless there was a later change. Nothing is downloaded."""
        async with self._order:
            if not self.changes.is_new(change):
                return
            self.changes.note(change)  # also if it fails: what is asked for here later counts
            try:
                if change.content:
                    await self._load_same(change)
                else:
                    self._unload(change.name)
            finally:
                self._tell()

    async def _load_same(self, change: AdapterChange) -> None:
        """Load what another worker has, from the same path."""
        if (known := self._loaded.get(change.name)) is not None and known[0].content == change.content:
            return
        self._check(change.name, change.root, in_place=True)
        folder = await asyncio.to_thread(_find_folder, change.root)
        is_3d_weight, expected = change.is_3d_weight, change.content
        await self._load(change.name, change.root, folder, is_3d_weight=is_3d_weight, expected=expected)

    async def _load(
        self,
        name: str,
        path: str,
        folder: Path,
        *,
        is_3d_weight: bool,
        parent: str | None = None,
        expected: str | None = None,
    ) -> str:
        content = await asyncio.to_thread(hash_adapter, folder)
        if expected not in (None, content):
            raise InvalidRequest(f"{path} has other files here")
        request = self._request(f"{name}:{content[:_NAME_HEX]}", folder, is_3d_weight=is_3d_weight)
        shares = self._tower is not None and await asyncio.to_thread(is_for_language_only, folder, self._tower)
        await self._add(request)
        if await asyncio.to_thread(hash_adapter, folder) != content:
            await self._llm.remove_lora(request.lora_int_id)
            raise InvalidRequest(f"{path} has changed while it was loaded: write it, then load it")
        if shares:
            self._for_language_only.add(request.lora_name)
        base = next((one for one in self._names if one == parent), self._names[0])
        self._loaded[name] = Adapter(name, path, content, base), request
        logger.info("loaded the adapter %r from %s (%s)", name, path, content)
        return content

    def _identify(self, identify: Callable[[str, Any], str], mm_hash: str, request: Any) -> str:
        is_shared = request is None or request.lora_name in self._for_language_only
        return mm_hash if is_shared else identify(mm_hash, request)

    def _unload(self, name: str) -> None:
        if self._loaded.pop(name, None) is not None:
            logger.info("unloaded the adapter %r", name)

    def _now(self, name: str) -> int:
        return self.changes.next_time_us(name, time.time_ns() // 1_000)

    def _check(self, name: str, path: str, *, in_place: bool = False) -> None:
        if not name or not path:
            raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.")
        if len(name) > MAX_ADAPTER_NAME_CHARS:
            raise InvalidRequest.of("lora_name", f"an adapter's name has at most {MAX_ADAPTER_NAME_CHARS} characters")
        if name in self._names:
            raise InvalidRequest.of("lora_name", f"The lora adapter '{name}' conflicts with a served base model.")
        if name in self._loaded and not in_place:
            raise InvalidRequest.of(
                "lora_name",
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
                "set 'load_inplace' to True.",
            )

    async def _add(self, request: Any) -> None:
        try:
            with failures():
                await self._llm.add_lora(request)
        except SemelError:
            raise
        except Exception as error:
            logger.exception("vLLM cannot load the adapter %s", request.lora_name)
            raise EngineFailed("the engine cannot load this adapter; the worker's log says why") from error

    def _request(self, name: str, folder: Path, *, is_3d_weight: bool) -> Any:
        from vllm.lora.request import LoRARequest

        number = self._numbers.setdefault(name, len(self._numbers) + 1)
        return LoRARequest(name, number, str(folder), is_3d_lora_weight=is_3d_weight)

    def _tell(self) -> None:
        for watcher in self.watchers:
            watcher()


def _find(path: str) -> Path:
    """Return the folder of an adapter; one on the hub is downloaded, as vLLM does."""
    from vllm.lora.utils import get_adapter_absolute_path

    return _find_folder(get_adapter_absolute_path(path))


def _find_folder(path: str) -> Path:
    """Return the folder of an adapter that is on this host."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ModelNotFound.of("lora_path", f"there is no adapter at {path} on the worker's host")
    return folder
