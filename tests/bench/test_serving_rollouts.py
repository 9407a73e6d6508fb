"""The parts of the scenarios rollouts, pages and video that need no engine: what is sent, counted and drawn."""

from __future__ import annotations

import io
from collections import Counter
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from PIL import Image

from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.bench import Bench, Effort, Side
from semel.lab.bench.serving.client import Client
from semel.lab.bench.serving.images import Images
from semel.lab.bench.serving.scenarios.document_pages import HEIGHT, WIDTH, draw_page, pages
from semel.lab.bench.serving.scenarios.rollouts import rollouts
from semel.lab.bench.serving.scenarios.video import draw_clip, video
from semel.lab.bench.serving.servers import Server
from semel.media import DecodeLimits, decode_video
from semel.telemetry import metrics

EFFORT = Effort(2, 2, 4, 0.1, 10, 2)


class Counting:
    """Answers at once. As semel it preprocesses an image once; as vLLM it looks it up for every request."""

    def __init__(self) -> None:
        self.answers: Counter[int] = Counter()
        self.images: list[str] = []

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.answers[body.get("n", 1)] += 1
        if isinstance(content := body["messages"][0]["content"], list):
            part = content[0]
            self.images.append(part[part["type"]]["url"])
        return web.json_response({})

    async def metrics(self, _: web.Request) -> web.Response:
        new = len(set(self.images))
        values = {
            metrics.POOL_DECODED: new,
            metrics.POOL_PROCESSED: new,
            metrics.FEATURE_BYTES_SENT: 100 * new,
            metrics.VLLM_MM_CACHE_QUERIES: len(self.images),
            metrics.VLLM_MM_CACHE_HITS: len(self.images) - new,
        }
        lines = [
            f"# TYPE {one.name.removesuffix('_total')} counter\n{one.name} {value}" for one, value in values.items()
        ]
        return web.Response(text="\n".join(lines) + "\n")


async def bench_of(stack: AsyncExitStack, *servers: Counting) -> Bench:
    sides = []
    for server in servers:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([web.post("/v1/chat/completions", server.chat), web.get("/metrics", server.metrics)])
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        sides.append(Side(Server((url,)), await stack.enter_async_context(Client(url))))
    return Bench(Pair(*sides), None, Images(1), EFFORT, lambda *_: None)


async def test_groups_are_counted_with_what_was_done_for_them() -> None:
    mine, theirs = Counting(), Counting()
    async with AsyncExitStack() as stack:
        rows = {row.name: row for row in await rollouts(await bench_of(stack, mine, theirs))}
    assert mine.answers == theirs.answers == {16: 3, 1: 48}
    decodes = rows["rollouts: 16 requests at once, decodes per group"]
    assert (decodes.semel.value, decodes.vllm and decodes.vllm.value) == (1, 16)
    assert rows["rollouts: n=16, preprocessings per group"].semel.value == 1
    assert rows["rollouts: n=16, feature bytes per group"].semel.value == 100
    assert "rollouts: n=16, encodes per group" not in rows, "no worker that was started here: nobody counts them"


@pytest.mark.slow
async def test_every_page_is_new_and_both_sides_get_the_same() -> None:
    mine, theirs = Counting(), Counting()
    async with AsyncExitStack() as stack:
        (row,) = await pages(await bench_of(stack, mine, theirs))
    assert row.name == "pages: new pages per second"
    assert len(set(mine.images)) == len(mine.images) == 24
    assert set(mine.images) == set(theirs.images)


@pytest.mark.slow
async def test_a_clip_is_asked_about_five_times_and_its_decodes_are_counted() -> None:
    mine, theirs = Counting(), Counting()
    async with AsyncExitStack() as stack:
        rows = {row.name: row for row in await video(await bench_of(stack, mine, theirs))}
    assert Counter(mine.images) == Counter(theirs.images)
    assert set(Counter(mine.images).values()) == {5}
    assert len(set(mine.images)) == 5  # one to warm up
    decodes = rows["video: decodes for five questions"]
    assert (decodes.semel.value, decodes.vllm and decodes.vllm.value, decodes.ok) == (1, 5, True)
    assert rows["video: what a repeat adds"].limit is not None


def test_a_clip_is_whole_and_depends_on_seed_and_number() -> None:
    clip = draw_clip(1, 1, seconds=1)
    decoded = decode_video(clip, DecodeLimits(), choose=lambda header: [header.num_frames - 1])
    assert (decoded.header.num_frames, decoded.frames.shape[1:3]) == (30, (360, 640))
    assert len({clip, draw_clip(1, 2, seconds=1), draw_clip(2, 1, seconds=1)}) == 3


def test_a_page_has_the_size_of_paper_and_depends_on_seed_and_number() -> None:
    page = draw_page(1, 1)
    assert Image.open(io.BytesIO(page)).size == (WIDTH, HEIGHT)
    assert page == draw_page(1, 1)
    assert len({page, draw_page(1, 2), draw_page(2, 1)}) == 3
