"""The sum of a host's memory, and the page that states it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from semel import sizing
from semel.core.flag import GIB, MIB
from semel.sizing import Host, memory_of
from tests.commands import invoke

PAGE = (Path(__file__).parent.parent / "docs/operate/capacity.md").read_text()


def total(host: Host) -> int:
    return sum(part.nbytes for part in memory_of(host))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 1 << 20), st.integers(0, 1 << 15))
def test_every_rank_holds_every_encoder_output(workers: int, ranks: int, embeddings: int, each: int) -> None:
    host = Host(2, workers=workers, ranks=ranks)
    more = replace(host, encoder_cache_embeddings=embeddings, embedding_bytes=each)
    assert total(more) - total(host) == workers * ranks * embeddings * each
    assert total(replace(host, embedding_tier_bytes=each)) - total(host) == workers * each, (
        "all ranks map the same memory"
    )


def test_the_command_counts_the_encoder_cache() -> None:
    flags = ["--encoder-cache-embeddings", "150000", "--embedding-bytes", "7168", "--ranks", "2"]
    shown = invoke("size", *flags, "--embedding-tier-gb", "3")
    assert "2.00 GiB  encoder caches" in shown.output
    assert "3.00 GiB  embedding tiers" in shown.output
    assert "0.00 GiB  encoder caches" in invoke("size").output


def test_the_page_states_the_constants_of_the_code() -> None:
    stated = [int(figure) * MIB for figure in re.findall(r"^\|.*\| (\d+) MiB", PAGE, re.MULTILINE)]
    code = [
        sizing.SUPERVISOR + sizing.LIBRARIES,
        sizing.FRONTEND,
        sizing.POOL_TEMPLATE,
        sizing.POOL_PROCESS,
        sizing.WORKER,
        sizing.ENGINE_CORE,
        sizing.ENGINE_RANK,
    ]
    assert stated == code


def test_a_host_that_was_measured_takes_what_is_predicted() -> None:
    """`semel serve` of a tiny Qwen2-VL on two cores, idle after its warm-up: 3,438 MiB."""
    bare = Host(processes=2, feature_cache_bytes=0, media_cache_bytes=0, max_media_bytes=0, item_cache_bytes=0)
    host = replace(bare, kv_cache_bytes=GIB, weights_bytes=4 * MIB)
    assert abs(total(host) / MIB / 3_438 - 1) < 0.1


def test_the_command_adds_up_every_bound() -> None:
    shown = invoke("size", "--frontends", "2", "--media-cache-gb", "1")
    assert shown.exit_code == 0
    assert re.search(r"6\.00 GiB  media in flight, and fetched", shown.output)
    whole = Host(2, frontends=2, media_cache_bytes=GIB, max_media_bytes=2 * GIB)
    assert f"{total(whole) / GIB:.2f} GiB  in all" in shown.output
