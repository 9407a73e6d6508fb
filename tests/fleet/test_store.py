"""A worker with a real engine and a real Redis that fails in every way, under 1,000 requests (issue 21).

Every answer is the one that was given when nothing failed, and a store that fails is waited for by three requests at
the most. The memory for encoder outputs is so small that nearly every request would fetch one.
"""

from __future__ import annotations

import base64
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from semel.media.decode.warmup_media import image_file
from semel.telemetry import metrics
from semel.telemetry.meter import Metric
from tests.embeddings.proxy import Answer, Proxy, constant, cut_after, honest, running_proxy, silent, trickle
from tests.embeddings.redis import Redis, running_redis
from tests.serve.served import sum_of, until
from tools.fleet.processes import Fleet, running_fleet

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly, pytest.mark.alone, pytest.mark.timeout(1_500)]

IMAGES = 48
REQUESTS = 170
FETCH_S = 0.2
TIER = ("--embedding-tier-gb", "0.004", "--embedding-staging-mb", "2", "--no-enable-prefix-caching")
SOON_S = 60.0


@dataclass(frozen=True)
class Store:
    """A fleet with a store, and what stands between the two."""

    fleet: Fleet
    redis: Redis
    proxy: Proxy
    answers: dict[int, str]

    def ask(self, number: int) -> str:
        data = base64.b64encode(image_file(448, 448, number).data).decode()
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        content = [{"type": "text", "text": "What is in this picture?"}, image]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
        response = httpx.post(f"{self.fleet.urls[0]}/v1/chat/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    def total(self, metric: Metric, labels: str = "") -> float:
        return sum_of(self.fleet.workers[0].metrics(), metric.name, labels)

    def fetches(self) -> float:
        return self.total(metrics.EMBEDDING_STORE_CALLS, 'operation="fetch"')

    def is_up(self) -> bool:
        return self.total(metrics.EMBEDDING_STORE_UP) == 1


@pytest.fixture(scope="module")
def store(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    home = tmp_path_factory.mktemp("redis")
    with running_redis(home) as redis, running_proxy(redis.address) as proxy:
        address, fetch_ms = f"valkey://{proxy.address.name}", str(int(FETCH_S * 1_000))
        store = (
            "--embedding-store",
            address,
            "--embedding-publish-min-requests",
            "1",
            "--embedding-fetch-ms",
            fetch_ms,
        )
        with running_fleet(tiny("qwen2-vl"), workers=1, frontends=1, worker_flags=(*TIER, *store)) as fleet:
            made = Store(fleet, redis, proxy, {})
            until(made.is_up, SOON_S)
            for number in range(IMAGES):
                made.answers[number] = made.ask(number)
            until(lambda: made.total(metrics.EMBEDDING_PUBLISHED) == IMAGES, SOON_S)
            yield made


@contextmanager
def paused(store: Store) -> Iterator[None]:
    store.redis.process.send_signal(signal.SIGSTOP)
    yield
    store.redis.process.send_signal(signal.SIGCONT)


@contextmanager
def filled(store: Store) -> Iterator[None]:
    """Nothing more is taken, and a part of the entries is gone."""
    store.redis.ask("CONFIG", "SET", "maxmemory", "1mb")
    yield
    store.redis.ask("CONFIG", "SET", "maxmemory", "0")


Fault = Callable[[Store], AbstractContextManager[None]]


def through(answer: Answer) -> Fault:
    @contextmanager
    def fault(store: Store) -> Iterator[None]:
        store.proxy.answer = answer
        yield
        store.proxy.answer = honest

    return fault


FAULTS: dict[str, Fault] = {
    "silent": through(silent),
    "paused": paused,
    "filled": filled,
    "cut": through(cut_after(700)),
    "slow": through(trickle),
    "wrong": through(constant(b"$99999999999\r\n")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_request_fails_or_changes_whatever_the_store_does(store: Store, fault: str) -> None:
    draw = random.Random(fault)
    until(store.is_up, SOON_S)
    fetched, seconds = store.fetches(), store.total(metrics.EMBEDDING_STORE_SECONDS, 'operation="fetch"')
    with FAULTS[fault](store):
        for _ in range(REQUESTS):
            number = draw.randrange(IMAGES)
            assert store.ask(number) == store.answers[number]
        asked = store.fetches() - fetched
        waited_s = store.total(metrics.EMBEDDING_STORE_SECONDS, 'operation="fetch"') - seconds
    if fault != "filled":
        assert asked <= REQUESTS / 4, "it is left alone"
        assert waited_s <= 2 * FETCH_S * max(asked, 1)
    until(store.is_up, SOON_S)
    hits = store.total(metrics.EMBEDDING_FETCHES, 'outcome="hit"')
    for number in range(IMAGES):
        assert store.ask(number) == store.answers[number]
    if fault not in ("filled", "wrong"):  # what looked damaged was deleted, and is published again when it is encoded
        assert store.total(metrics.EMBEDDING_FETCHES, 'outcome="hit"') > hits, "it is used again"


def test_a_store_that_is_killed_for_good_is_not_missed(store: Store) -> None:
    until(store.is_up, SOON_S)
    fetched = store.fetches()
    store.redis.process.kill()
    for number in range(IMAGES):
        assert store.ask(number) == store.answers[number]
    assert not store.is_up()
    assert store.fetches() - fetched <= 3
