"""Frontends as they are composed: with a media store each knows the names of all, without it only its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semel.store.objects import BucketObjects
from semel.store.settings import MediaStoreSettings
from semel.store.upload import FRONTEND, Payer
from tests.frontend import rig
from tests.frontend.shipped import DrawnPool, Frontend, shipped
from tests.frontend.test_urls import CHAT
from tests.render.conftest import folder
from tests.render.drawn import image_part

__all__ = ["folder"]

NAMES = 50
CONTRACT = replace(rig.CONTRACT, max_items={"image": NAMES}, max_tokens=10_000)


def body(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1, **fields}


def alone(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": None, "uuid": name}


def named(number: int, name: str) -> dict[str, Any]:
    return {**image_part(number), "uuid": name}


async def status(frontend: Frontend, *parts: dict[str, Any], **fields: Any) -> int:
    return (await frontend.client.post(CHAT, json=body(*parts, **fields))).status_code


@pytest.mark.parametrize("store", ["shared", "none", "gone", "overwriting"])
async def test_a_name_is_known_at_every_frontend_with_a_store_and_at_its_own_without(
    tmp_path: Path, folder: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def overwrite(self: BucketObjects, path: str, data: bytes, *, payer: Payer = FRONTEND) -> bool:
        await self.put(path, data, payer=payer)
        return True

    if store == "overwriting":
        monkeypatch.setattr(BucketObjects, "create", overwrite)
    media_store = MediaStoreSettings(None if store == "none" else str(tmp_path / "store"))
    pools = [DrawnPool() for _ in range(3)]
    async with shipped(tmp_path, folder, *pools, contract=CONTRACT, media_store=media_store) as world:
        if store == "gone":
            (tmp_path / "store").rename(tmp_path / "elsewhere")
            (tmp_path / "store").write_text("no folder")
        one, other, third = world.frontends
        assert await status(one, *(named(number, f"{number}") for number in range(NAMES))) == 200
        for frontend in world.frontends:
            known = await status(frontend, *(alone(f"{number}") for number in range(NAMES)))
            assert known == (200 if store == "shared" or frontend is one else 404)
        assert await status(other, alone("0"), cache_salt="another") == 404
        assert sum(pool.processed for pool in pools) == NAMES

        # Two contents: nobody gets the second, and who did not know the first, nothing.
        assert await status(other, named(7, "twice")) == 200
        assert await status(one, named(8, "twice")) == 200
        assert await status(one, alone("twice")) == (409 if store == "shared" else 200)
        assert await status(third, alone("twice")) == (409 if store == "shared" else 404)
        learned = [frontend.metric("semel_media_names_learned_total") for frontend in world.frontends]
        unshared = sum(frontend.metric("semel_media_names_unshared_total") for frontend in world.frontends)
        assert learned == ([0, NAMES, NAMES] if store == "shared" else [0, 0, 0])
        assert (unshared >= NAMES) == (store == "gone"), unshared


async def test_two_frontends_that_bind_a_name_at_once_never_answer_it_with_two_contents(
    tmp_path: Path, folder: Path
) -> None:
    media_store = MediaStoreSettings(str(tmp_path / "store"))
    async with shipped(tmp_path, folder, DrawnPool(), DrawnPool(), media_store=media_store) as world:
        for race in range(20):
            name = f"race {race}"
            sent = [status(frontend, named(2 * race + index, name)) for index, frontend in enumerate(world.frontends)]
            assert await asyncio.gather(*sent) == [200, 200]
            seen = [await status(frontend, alone(name)) for frontend in world.frontends]
            assert sorted(seen) in ([200, 409], [409, 409]), "one has won, the other refuses"
