"""Frontends as they are composed: through a media store they fetch a URL once between them, without it once each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from semel.media.fetch.settings import FetchSettings
from semel.store.settings import MediaStoreSettings
from tests.frontend.shipped import DrawnPool, shipped
from tests.frontend.test_urls import CHAT, body
from tests.media.origin import origin, reply
from tests.render.conftest import folder
from tests.waiting import until

__all__ = ["folder"]

IMAGES = 6
FRONTENDS = 3


@pytest.mark.parametrize("store", ["shared", "none", "gone"])
async def test_frontends_fetch_a_url_once_with_a_store_and_each_without(
    tmp_path: Path, folder: Path, store: str
) -> None:
    location = None if store == "none" else str(tmp_path / "store")
    async with origin() as server:
        for number in range(IMAGES):
            server[f"/{number}"] = reply(b"%d" % number, cache_control="max-age=60")
        fetch = FetchSettings((f"127.0.0.1:{server.port}",), allow_http=True, allowed_networks=("127.0.0.1/32",))
        pools = [DrawnPool() for _ in range(FRONTENDS)]
        media_store = MediaStoreSettings(location)
        async with shipped(tmp_path, folder, *pools, media_store=media_store, fetch=fetch) as world:
            if store == "shared":
                fetches: list[Any] = [one.service.serving().pipeline.fetch for one in world.frontends]
                await until(lambda: all(one.__self__._shared._store._files._listed.is_set() for one in fetches))
            if store == "gone":
                (tmp_path / "store").rename(tmp_path / "elsewhere")
                (tmp_path / "store").write_text("no folder")
            replies = await asyncio.gather(
                *(
                    one.client.post(CHAT, json=body(server.url(f"/{number}")))
                    for number in range(IMAGES)
                    for one in world.frontends
                )
            )
            assert [one.status_code for one in replies] == [200] * len(replies), replies[0].text
            counted = {
                outcome: sum(one.metric("semel_media_fetches_total", outcome=outcome) for one in world.frontends)
                for outcome in ("fetched", "shared")
            }
            unshared = sum(one.metric("semel_media_fetches_unshared_total") for one in world.frontends)
        all_of_them = IMAGES * FRONTENDS
        once = IMAGES if store == "shared" else all_of_them
        assert len(server.seen) == counted["fetched"] == once
        assert counted["shared"] == all_of_them - once
        assert unshared == (all_of_them if store == "gone" else 0)
