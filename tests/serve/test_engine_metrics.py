"""`vllm:*` at a worker beside bare vLLM's own, with the same flags and requests: names, labels and counts (D8)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import semel
from semel.interchange.safetensors import FeatureEntry, read
from semel.settings.secrets import read_admin_key
from tests.engine.parity import draw_image
from tests.serve.both import Both
from tests.serve.generating import generated, rendered, rendered_file
from tests.serve.served import image_url, sum_of, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

Chat = list[dict[str, Any]]
Names = dict[str, frozenset[str]]
RNG = np.random.default_rng(17)


def page(url: str) -> str:
    reply = httpx.get(f"{url}/metrics", timeout=10)
    assert reply.status_code == 200, reply.text
    return reply.text


def engine_names(text: str) -> Names:
    """Every series of vLLM's by its name, with the names of its labels."""
    return {
        sample.name: frozenset(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }


def counts(*urls: str) -> Counter[str]:
    """Queries and hits of vLLM's counters, summed over processes."""
    pages = [page(url) for url in urls]
    return Counter(
        {name: int(sum(sum_of(text, f"vllm:mm_cache_{name}_total") for text in pages)) for name in ("queries", "hits")}
    )


def chat_of(*pictures: Any) -> Chat:
    text = {"type": "text", "text": "What is this?"}
    return [{"role": "user", "content": [*map(image_url, pictures), text]}]


def test_a_worker_shows_every_name_and_label_that_bare_vllm_does_and_no_other(both: Both) -> None:
    """Control: a frontend's page, which has none of an engine's."""
    both.chat(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    bare, ours = engine_names(page(both.bare_url)), engine_names(page(both.admin_url))
    assert len(bare) > 100
    assert ours == bare
    assert not engine_names(page(both.served.url)).keys() - {"vllm:mm_cache_queries_total", "vllm:mm_cache_hits_total"}


def test_a_worker_s_page_has_every_family_once_and_its_values_move_as_bare_vllm_s_do(both: Both) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")

    def values(url: str) -> list[float]:
        return [sum_of(page(url), name) for name in names]

    def series(url: str) -> int:
        return sum(line.startswith("vllm:") for line in page(url).splitlines())

    before = values(both.admin_url), values(both.bare_url)
    known = series(both.admin_url)
    for _ in range(2):
        both.chat(max_tokens=5)
    after = values(both.admin_url), values(both.bare_url)
    ours, bare = ([new - old for new, old in zip(*pair, strict=True)] for pair in zip(after, before, strict=True))
    assert ours == bare
    assert ours[1:] == [10.0, 2.0]
    assert series(both.admin_url) == known == series(both.bare_url), "no label has a value of a request's"
    families = Counter(family.name for family in text_string_to_metric_families(page(both.admin_url)))
    assert set(families.values()) == {1}
    assert {name.partition("_")[0] for name in families} >= {"semel"}


def test_items_count_in_the_process_that_renders_them_and_their_sum_is_bare_vllm_s_D8(both: Both) -> None:
    """A worker that counted all that its engine is shown, as vLLM does, would make the sum twice as high."""
    first, second, third = (draw_image(RNG) for _ in range(3))
    worker, fleet, bare = counts(both.admin_url), counts(both.served.url, both.admin_url), counts(both.bare_url)
    for pictures in ((first,), (first, second), (second, third, first), (third,)):
        both.chat(messages=chat_of(*pictures), cached=False)
    assert counts(both.bare_url) - bare == Counter(queries=7, hits=4)
    assert counts(both.served.url, both.admin_url) - fleet == counts(both.bare_url) - bare
    assert counts(both.admin_url) == worker


def test_items_that_are_sent_as_tensors_count_at_the_worker_and_what_is_only_named_nowhere_D8(both: Both) -> None:
    """As vLLM counts what is put into its cache from outside (`inject_into_mm_cache`): each place that has tensors."""
    chat = chat_of(draw_image(RNG), draw_image(RNG))
    file = rendered_file(both.served, chat)
    worker, frontend = counts(both.admin_url), counts(both.served.url)
    answers = [generated(both.served, file) for _ in range(3)]
    assert counts(both.admin_url) - worker == Counter(queries=6, hits=4)
    named = generated(both.served, rendered(both.served, chat).json())
    assert [named, *answers] == [named] * 4
    assert counts(both.admin_url) - worker == Counter(queries=6, hits=4)
    assert counts(both.served.url) == frontend


def test_injected_items_count_at_the_worker_and_its_log_tells_the_hit_rates_D8(both: Both) -> None:
    entries = read(memoryview(rendered_file(both.served, chat_of(draw_image(RNG)))))
    features = {entry.digest: entry.feature for entry in entries if isinstance(entry, FeatureEntry)}
    worker, frontend = counts(both.admin_url), counts(both.served.url)
    key = read_admin_key(both.admin_key)
    statuses = [semel.inject(both.admin_url, features, key=key)[0].status for _ in range(2)]
    assert statuses == ["stored", "held"]
    assert counts(both.admin_url) - worker == Counter(queries=2, hits=1)
    assert counts(both.served.url) == frontend
    both.chat(messages=chat_of(draw_image(RNG)))
    until(lambda: "item cache hits: worker " in both.served.log.read_text(), 30)
    until(lambda: "MM cache hit rate: " in both.served.log.read_text(), 30)
