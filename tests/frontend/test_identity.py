"""What a frontend says of itself to whoever compares cells: in headers of `/ready`."""

from __future__ import annotations

from semel.cells.check import CELL_HEADER, CONTRACT_HEADER
from semel.fleet.compatibility import contract_id
from tests.frontend.rig import Rig


async def test_ready_names_the_cell_and_what_is_served(app: Rig) -> None:
    served = contract_id(app.service.serving().contract)
    assert (await app.client.get("/ready")).headers.get(CELL_HEADER) is None
    app.service.cell = "eu-1"
    reply = await app.client.get("/ready")
    assert (reply.headers[CELL_HEADER], reply.headers[CONTRACT_HEADER]) == ("eu-1", served)
    app.service.suspend("no worker is connected")
    reply = await app.client.get("/ready")
    assert (reply.status_code, reply.headers[CELL_HEADER]) == (503, "eu-1")
    assert CONTRACT_HEADER not in reply.headers
