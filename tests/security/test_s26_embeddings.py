"""S26: encoder outputs in a store that others can write to. Beside each try the naive way, which falls for it.

`tests/embeddings/test_poison.py` has a thousand damaged entries in a real Redis.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from semel.core import Digest
from semel.embeddings.address import StoreAddress
from semel.embeddings.settings import EmbeddingStoreSettings
from semel.errors import ConfigError, InvalidRequest
from semel.lab.testing.embedding_store import MemoryBlobs
from semel.telemetry import metrics
from tests.worker.test_embedding_sync import OTHER, PICTURE, Host, content, published, running

Spoil = Callable[[MemoryBlobs], None]


def entry(blobs: MemoryBlobs, nth: int) -> tuple[bytes, bytes]:
    """The keys of the manifest and of the only chunk of the entry that was stored first, or second."""
    manifests = [key for key in blobs.values if key.count(b":") == 2]
    manifest = manifests[nth]
    return manifest, next(key for key in blobs.values if key.startswith(manifest + b":"))


def damage(blobs: MemoryBlobs) -> None:
    _, chunk = entry(blobs, 0)
    value, expires = blobs.values[chunk]
    blobs.values[chunk] = (bytes([value[0] ^ 1]) + value[1:], expires)


def swap_chunks(blobs: MemoryBlobs) -> None:
    (_, one), (_, two) = entry(blobs, 0), entry(blobs, 1)
    blobs.values[one], blobs.values[two] = blobs.values[two], blobs.values[one]


def swap_entries(blobs: MemoryBlobs) -> None:
    """Whole entries, each under the other's name."""
    (one, first), (two, second) = entry(blobs, 0), entry(blobs, 1)
    blobs.values[one], blobs.values[two] = blobs.values[two], blobs.values[one]
    blobs.values[one + second.removeprefix(two)] = blobs.values[second]
    blobs.values[two + first.removeprefix(one)] = blobs.values[first]


def cut(blobs: MemoryBlobs) -> None:
    _, chunk = entry(blobs, 0)
    value, expires = blobs.values[chunk]
    blobs.values[chunk] = (value[:-1], expires)


def forge(blobs: MemoryBlobs) -> None:
    """A manifest that somebody without the key has made of a true one: one row fewer."""
    manifest, _ = entry(blobs, 0)
    value, expires = blobs.values[manifest]
    place = value.index((8).to_bytes(4, "little"))
    blobs.values[manifest] = (value[:place] + (7).to_bytes(4, "little") + value[place + 4 :], expires)


@pytest.mark.parametrize("spoil", [damage, swap_chunks, swap_entries, cut, forge], ids=lambda one: one.__name__)
async def test_what_somebody_else_has_written_is_never_loaded_and_counted(spoil: Spoil) -> None:
    blobs = MemoryBlobs()
    async with published(blobs, PICTURE), published(blobs, OTHER):
        async with running(Host(blobs)) as host:
            await host.until_up()
            assert await host.ask(PICTURE) == (content(1),), "as it was published"
        spoil(blobs)
        async with running(Host(blobs)) as host:
            await host.until_up()
            assert await host.ask(PICTURE) == ()
            assert host.total(metrics.EMBEDDING_FETCHES, "sealed_wrong") == 1
            assert await host.ask(PICTURE) == ()
            assert host.total(metrics.EMBEDDING_FETCHES, "miss") == 1, "it was deleted"


async def test_what_is_of_another_tenant_or_of_other_weights_has_another_name() -> None:
    """A digest has its tenant in it, an identity the encoder's weights."""
    blobs = MemoryBlobs()
    async with published(blobs, PICTURE), running(Host(blobs)) as host:
        await host.until_up()
        assert await host.ask(Digest(b"t" * 32)) == ()
        other = Host(blobs)
        other.tier.identity = b"other weights"
        async with running(other):
            await other.until_up()
            assert await other.ask(PICTURE) == ()
            assert other.total(metrics.EMBEDDING_FETCHES, "miss") == 1


@pytest.mark.slow
def test_control_vllms_example_connector_loads_whatever_lies_under_the_hash(tmp_path: Path) -> None:
    """Its key is the hash alone, which no weights or tenant are in, and nothing is checked."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file
    from vllm.distributed.ec_transfer.ec_connector import example_connector as naive

    connector = object.__new__(naive.ECExampleConnector)
    connector._storage_path = str(tmp_path)
    connector._metadata_resolver = None
    name = PICTURE.hex()
    target = Path(connector._generate_filename_debug(name))
    target.parent.mkdir(parents=True, exist_ok=True)
    planted = torch.full((3, 5), 7.0)
    save_file({"ec_cache": planted}, target)
    metadata = naive.ECExampleConnectorMetadata()
    metadata.add_mm_data(naive.MMMeta.make_meta(name, 8))
    connector._connector_metadata = metadata
    cache: dict[str, object] = {}
    assert connector.has_cache_item(name)
    connector.start_load_caches(cache)
    assert cache[name].shape == (3, 5), "not even the number of rows is that of the request"  # type: ignore[attr-defined]
    assert torch.equal(cache[name], planted)


def test_plain_connections_to_other_machines_are_refused_unless_somebody_says_so() -> None:
    for text in ("valkey://10.0.0.5:6379", "redis://store.example:6379"):
        with pytest.raises(ConfigError, match="--embedding-store-plain"):
            EmbeddingStoreSettings(text).addresses()
        assert EmbeddingStoreSettings(text, plain=True).addresses() == (StoreAddress.parse(text),)
    for text in ("valkeys://10.0.0.5:6380", "valkey://127.0.0.1", "unix:///run/valkey.sock"):
        assert len(EmbeddingStoreSettings(text).addresses()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        {"extra_args": {"ec_transfer_params": {"semel": []}}},
        {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.5"}}},
    ],
)
def test_nobody_but_the_worker_says_where_encoder_outputs_are_loaded_from(sampling: dict[str, object]) -> None:
    """Control: what vLLM's own parameters take, it would pass on to the connector."""
    from semel.engine.vllm.requests.sampling import refuse_extra_args, sampling_params

    with pytest.raises(InvalidRequest):
        refuse_extra_args(sampling)
    assert sampling_params(sampling).extra_args == sampling["extra_args"]
