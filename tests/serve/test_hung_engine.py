"""An engine that hangs under load: it is noticed by its steps, ended and replaced, and every client is told (S22).

`pytest -m engine tests/serve/test_hung_engine.py -s` prints how long each part took. Before, `/ready` said 200 for ever
and requests waited for ever.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest

from tests.conftest import Folder
from tests.serve.served import Served, serving, until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly, pytest.mark.alone, pytest.mark.timeout(600)]

PROGRESS_S = 20
NOTICED_S = 30.0


@contextmanager
def under_load(served: Served, clients: int = 4) -> Iterator[Counter[int]]:
    """Clients that ask all the time, half of them for streams; how often each status came."""
    statuses: Counter[int] = Counter()
    over = threading.Event()

    def ask(number: int) -> None:
        while not over.is_set():
            try:
                statuses[served.chat(f"client {number}", max_tokens=64, stream=bool(number % 2)).status_code] += 1
            except httpx.HTTPError:
                statuses[0] += 1
            time.sleep(0.05)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        over.set()
        for thread in threads:
            thread.join(90)


def core_of(served: Served) -> psutil.Process:
    (core,) = [
        one for one in served.child("worker").children(recursive=True) if "EngineCore" in " ".join(one.cmdline())
    ]
    return core


def test_an_engine_core_that_is_stopped_under_load_is_noticed_within_30_s_and_replaced(
    tiny: Folder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with serving(tiny("qwen2-vl"), tmp_path_factory.mktemp("hung"), "--engine-progress-s", str(PROGRESS_S)) as served:
        with under_load(served) as statuses:
            until(lambda: statuses[200] >= 20, 60)
            worker, core = served.child("worker"), core_of(served)
            core.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            until(lambda: not served.ready()[0], 2 * NOTICED_S)
            noticed_s = time.monotonic() - stopped
            reason = served.ready()[1] or ""
            until(lambda: not core.is_running() and not worker.is_running(), 30)
            ended_s = time.monotonic() - stopped
        assert noticed_s <= NOTICED_S
        assert noticed_s >= PROGRESS_S
        assert "engine_hung" in reason
        assert set(statuses) <= {200, 503}, "nobody waits for ever, and nobody is told anything else"
        assert statuses[503] >= 1
        until(lambda: served.ready()[0], 240)
        replaced_s = time.monotonic() - stopped
        assert served.chat("after").status_code == 200
        assert core_of(served).pid != core.pid
        assert served.metric("semel_engines_lost_total", 'code="engine_hung"') == 1
        assert "engine_hung: no step for" in served.log.read_text()
        print(f"noticed after {noticed_s:.1f} s, ended after {ended_s:.1f} s, replaced after {replaced_s:.1f} s")  # noqa: T201
        print(f"answers by status: {dict(statuses)}")  # noqa: T201
