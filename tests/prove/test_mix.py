"""The mix of a run through three frontends and a worker in one process, whole and without protections (D1, D3)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from semel.core import Keyring
from semel.frontend.app import create_app
from semel.lab.prove import without
from semel.lab.prove.answers import ask_references
from semel.lab.prove.driver import Balancer, Driver, Tally
from semel.lab.prove.images import serving_images
from semel.lab.prove.page import checks_of
from semel.lab.prove.plan import REFUSALS, TENANTS, Media, Mix, draw_image, draw_questions, plan
from semel.lab.prove.run import found_made
from semel.lab.prove.work import Work
from semel.lab.prove.world import post, upload
from semel.lab.testing.pacing import DeterministicEngine
from semel.media.fetch.settings import FetchSettings
from semel.store.settings import MediaStoreSettings
from tests.frontend import shipped as frontends
from tests.render.conftest import write_model
from tests.web.test_server import served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MIX = Mix(400, seed=1, refusals=tuple(one for one in REFUSALS if one != "damaged image"))
"""The pool of these frontends makes a feature of any bytes."""

KEYS = {tenant: f"the-api-key-of-{tenant}" for tenant in TENANTS}
ENGINE_BYTES, CACHE_BYTES = 44 * 4_200, 60 * 4_200
"""Of 44 and 60 items."""


@asynccontextmanager
async def running(home: Path, model: Path, port: int) -> AsyncIterator[tuple[frontends.Shipped, list[str]]]:
    """Three frontends with small caches, a media store and URLs of this machine; their addresses."""
    fetch = FetchSettings((f"127.0.0.1:{port}",), allow_http=True, allowed_networks=("127.0.0.0/8",))
    pools = [frontends.DrawnPool() for _ in range(3)]
    store = MediaStoreSettings(str(home / "media"))
    async with (
        AsyncExitStack() as stack,
        frontends.shipped(
            home,
            model,
            *pools,
            engine_bytes=ENGINE_BYTES,
            cache_bytes=CACHE_BYTES,
            media_store=store,
            fetch=fetch,
        ) as world,
    ):
        urls = []
        for one in world.frontends:
            app = create_app(one.service, one.parts.meter, Keyring(list(KEYS.items())))
            urls.append(f"http://127.0.0.1:{(await stack.enter_async_context(served(app))).port}")
        yield world, urls


async def drive(home: Path, model: Path, protection: str = "") -> tuple[Tally, Work, int]:
    """The mix, without the conversations that need stored responses, and how much a tenant found made for another."""
    images = [draw_image(MIX.seed, number) for number in range(MIX.images)]
    async with serving_images(images) as server, running(home, model, server.port) as (world, urls):
        files = await upload(urls[0], KEYS, images)
        questions = [one for one in draw_questions(MIX) if not one.next_text]
        async with aiohttp.ClientSession() as session:
            ask = partial(post, session, urls[0], key=KEYS["alice"])
            references = await ask_references(ask, questions, Media(images), "alice", is_bare=False)
        if protection:
            without.PROTECTIONS[protection]()
        driver = Driver(Balancer(lambda: urls), references, Media(images, server.url, files), KEYS, at_a_time=12)
        tally = await driver.run([one for one in plan(MIX) if not one.question.next_text])
        sent = sum(one.metric("semel_features_sent_total") for one in world.frontends)
        found = await found_made(urls[0], KEYS, MIX, lambda: float(world.frontends[0].pool.processed))
        return tally, Work(sent=sent, resubmitted=world.worker.resubmissions), found


@pytest.mark.parametrize(
    ("protection", "wrong"),
    [("", []), ("repair", ["valid requests that failed"]), ("ledger", ["items sent, per showing"]), ("tenant-key", [])],
)
async def test_the_mix_is_answered_as_if_alone_and_a_missing_protection_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protection: str, wrong: list[str]
) -> None:
    monkeypatch.setattr(frontends, "EchoEngine", lambda contract: DeterministicEngine(contract, rate=400.0))
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(without, "_set", monkeypatch.setattr)
    tally, work, found = await drive(tmp_path, write_model(tmp_path / "model"), protection)
    assert [check.name for check in checks_of(tally, work) if not check.ok] == wrong, tally.faults
    assert found == (4 if protection == "tenant-key" else 0), "of four items"
    assert work.resubmitted > 0 or protection == "ledger", "nothing was lost, so nothing was repaired"
    assert tally.outcomes["answered"] > 100 and tally.outcomes["streamed"] > 100 and tally.outcomes["refused"] > 20
