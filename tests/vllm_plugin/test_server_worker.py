"""A plain `vllm serve` with `SEMEL_LISTEN` behind a `semel frontend`: a short run of `scripts/door-load`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from semel.lab.prove.processes import FRONTEND_START_S, Fleet, Node
from semel.settings.secrets import read_key
from tests.vllm_plugin.conftest import DoorServer
from tools.fleet.door import ask_both, lost_announcements
from tools.fleet.plan import Load, draw_images

pytestmark = [pytest.mark.engine, pytest.mark.timeout(580)]


@pytest.fixture(scope="module")
def frontend(door_server: DoorServer) -> Iterator[Node]:
    """A frontend whose only worker is in vLLM's server."""
    home = door_server.home
    node = Fleet(door_server.folder, home, read_key(home / "key"), "").begin_frontend([door_server.listen])
    try:
        node.until_up("/ready", FRONTEND_START_S)
        yield node
    finally:
        node.end()


async def test_on_both_routes_at_once_all_are_answered_alike_and_no_announcement_is_lost(
    door_server: DoorServer, frontend: Node
) -> None:
    load = Load(100, images=36, pairs=4, aborted=0.25, refused=0.0)
    tally = await ask_both([door_server.base_url, frontend.url], load)
    assert tally.failures == []
    assert tally.good > 50
    assert await lost_announcements(frontend, draw_images(10)) == 0
    assert "the engine had lost" not in door_server.log.read_text()
