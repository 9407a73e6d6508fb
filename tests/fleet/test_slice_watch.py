"""Discovery by EndpointSlices, over HTTP against a server that lists and watches (`semel.lab.testing.kubernetes`)."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import trustme

from semel.errors import ConfigError
from semel.fleet import kubernetes_api, slice_watch
from semel.fleet.discovery import WorkerDirectory
from semel.fleet.endpoint_slices import ServicePort
from semel.fleet.fleet import Fleet
from semel.fleet.kubernetes_api import KubernetesApi
from semel.fleet.membership import Membership
from semel.fleet.slice_watch import ApiError, Expired, SliceSource
from semel.lab.testing.kubernetes import Pod, SliceServer, slice_of
from semel.settings.environment import kubernetes_api as api_of_cluster
from tests.fleet.test_membership import PAUSE_S, Frontend, connect, tokens
from tests.fleet.workers import several, standing
from tests.waiting import until
from tests.worker.pairing import expected

SERVICE = ServicePort("semel", "workers", "wire")
VERSIONS = ("1.29", "1.34", "1.37")


def pod(number: int, **told: bool) -> Pod:
    return Pod(f"worker-{number}", f"10.0.{number // 250}.{number % 250 + 1}", **told)


def url(number: int) -> str:
    return f"tcp://{pod(number).address}:9000"


system_context = cache(ssl.create_default_context)


@pytest.fixture(autouse=True)
def _one_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the certificates of the system once, and not for each call, which takes 50 ms."""
    make = ssl.create_default_context

    def made(*purpose: ssl.Purpose, cafile: Path | None = None) -> ssl.SSLContext:
        return make(*purpose, cafile=cafile) if purpose or cafile else system_context()

    monkeypatch.setattr(ssl, "create_default_context", made)


class Rig:
    """A server, a source that follows it, and the pauses that it made."""

    def __init__(self, server: SliceServer, address: str, home: Path, kind: type[SliceSource] = SliceSource) -> None:
        self.server = server
        self.token_file = home / "token"
        self.token_file.write_text(f"{server.token}\n")
        self.api = KubernetesApi(address, self.token_file, None)
        self.pauses: list[float] = []
        self.source = kind(SERVICE, self.api, sleep=self._sleep, jitter=lambda: 1.0)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(min(seconds, 0.01))

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        await self.source.read()
        task = asyncio.create_task(self.source.watch())
        try:
            await until(lambda: self.server.watches > 0)
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def sees(self, *numbers: int) -> None:
        """Wait until it names these and no others."""
        await until(lambda: self.source._workers == tuple(sorted(map(url, numbers))))

    async def stays(self, *numbers: int) -> None:
        """It names these and no others over some attempts."""
        attempts = len(self.pauses)
        while len(self.pauses) < attempts + 3:
            assert await self.source.read() == tuple(sorted(map(url, numbers)))
            await self.server.cut()
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running(home: Path, *slices: dict[str, Any], kind: type[SliceSource] = SliceSource) -> AsyncIterator[Rig]:
    server = SliceServer()
    for one in slices:
        await server.put(one)
    async with server.running() as address:
        yield Rig(server, address, home, kind)


@pytest.mark.slow
async def test_a_thousand_endpoints_are_found_and_one_that_ends_is_named_no_more_before_it_is_gone(
    tmp_path: Path,
) -> None:
    pods = [pod(number) for number in range(1_000)]
    slices = [slice_of(f"s-{at}", pods[at : at + 100]) for at in range(0, 1_000, 100)]
    async with running(tmp_path, *slices) as rig_:
        server = rig_.server
        server.page_slices = 3
        assert await rig_.source.read() == tuple(sorted(map(url, range(1_000))))
        assert server.lists == 4, "in pages"
        async with rig_.watching():
            ending = [pod(150, is_terminating=True) if one is pods[150] else one for one in pods[100:200]]
            await server.put(slice_of("s-100", ending))
            await rig_.sees(*(number for number in range(1_000) if number != 150))
            assert pods[150].address in str(server._slices["s-100"]), "it is there, and answers what it has"
            await server.put(slice_of("s-100", ending[:50] + ending[51:]))
            await server.put(slice_of("s-new", [pod(1_000), pod(1_001, is_ready=False)]))
            await server.delete("s-900")
            await rig_.sees(*(number for number in (*range(900), 1_000) if number != 150))
        assert server.lists == 4, "all of it came by the watch"
        for answer in server.answers:
            for version in VERSIONS:
                _validate(answer, version)


def _validate(answer: dict[str, Any], version: str) -> None:
    if "items" in answer:
        items = [{"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", **one} for one in answer["items"]]
        kubernetes_validate.validate({**answer, "items": items}, version, strict=True)
    elif answer["type"] != "BOOKMARK":  # which has a version and nothing else, and fits no schema
        kubernetes_validate.validate(answer["object"], version, strict=True)


async def test_mutant_an_answer_that_fits_no_schema_is_found(tmp_path: Path) -> None:
    one = slice_of("s", [pod(1)])
    one["endpoints"][0]["adresses"] = one["endpoints"][0].pop("addresses")
    with pytest.raises(kubernetes_validate.ValidationError):
        _validate({"type": "ADDED", "object": one}, "1.34")


class ForgetsOnError(SliceSource):
    """The wrong implementation: what cannot be read names nobody."""

    def _complain(self, error: ApiError) -> None:
        self._workers = ()
        super()._complain(error)


FAULTS: dict[str, Callable[[SliceServer], object]] = {
    "500": lambda server: server.refusals.extend([500] * 6),
    "forbidden": lambda server: server.refusals.extend([403] * 6),
    "token": lambda server: setattr(server, "token", "another"),
    "no JSON": lambda server: server.lines.extend([b"<html>\n"] * 4),
    "unknown event": lambda server: server.lines.append(b'{"type":"GONE","object":{}}\n'),
    "half an event": lambda server: server.lines.append(b'{"type":"DELETED","object":{"metadata":{"name":"s-1"'),
    "error": lambda server: server.lines.append(b'{"type":"ERROR","object":{"code":500,"message":"etcd"}}\n'),
    "cut": lambda server: server.lines.clear(),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_broken_watch_takes_nobody_away_and_what_was_missed_is_found_later(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, slice_of("s-1", [pod(1)]), slice_of("s-2", [pod(2)])) as rig_, rig_.watching():
        await rig_.sees(1, 2)
        FAULTS[fault](rig_.server)
        await rig_.server.cut()
        await rig_.stays(1, 2)
        rig_.server.token = "token"
        await rig_.server.put(slice_of("s-3", [pod(3)]))
        await rig_.server.delete("s-1")
        await rig_.sees(2, 3)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors, "it is told"
    assert len(errors) <= 3, "once for each kind of fault"
    assert all(
        "--worker-endpoint-slices semel/workers:wire cannot be read" in one and "are kept" in one for one in errors
    )


async def test_mutant_a_source_that_names_nobody_while_it_fails_is_found(tmp_path: Path) -> None:
    async with running(tmp_path, slice_of("s-1", [pod(1)]), kind=ForgetsOnError) as rig_, rig_.watching():
        await rig_.sees(1)
        rig_.server.refusals.extend([500] * 6)
        await rig_.server.cut()
        with pytest.raises(AssertionError):
            await rig_.stays(1)


async def test_a_list_that_comes_half_takes_nobody_away(tmp_path: Path) -> None:
    slices = [slice_of(f"s-{number}", [pod(number)]) for number in range(4)]
    async with running(tmp_path, *slices) as rig_, rig_.watching():
        rig_.server.page_slices = 2
        rig_.server.compact()
        rig_.server.advance()
        pages = partial(KubernetesApi.page, rig_.api)

        async def half(_: object, service: ServicePort, position: str) -> bytes:
            if position:
                raise ApiError("the second page does not come")
            return await pages(service, position)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KubernetesApi, "page", half)
            rig_.source._version = None
            await rig_.server.cut()
            await rig_.stays(0, 1, 2, 3)
        await rig_.server.delete("s-0")
        await rig_.sees(1, 2, 3)


class KeepsItsVersion(SliceSource):
    """The wrong implementation: what is too old is asked for again and again."""

    async def _follow(self, version: str) -> None:
        try:
            await super()._follow(version)
        except Expired as error:
            raise ApiError(str(error)) from None


@pytest.mark.parametrize("kind", [SliceSource, KeepsItsVersion])
@pytest.mark.parametrize("status", [True, False])
async def test_a_version_that_has_expired_costs_a_new_list(
    kind: type[SliceSource], status: bool, tmp_path: Path
) -> None:
    """As a status of the answer, and as an event in it. Control: without a new list nothing is heard any more."""
    async with running(tmp_path, slice_of("s-1", [pod(1)]), slice_of("s-2", [pod(2)]), kind=kind) as rig_:
        rig_.server.bookmarks = False
        async with rig_.watching():
            rig_.server.refusals.extend([500] * 3)
            await rig_.server.cut()
            await until(lambda: not rig_.server.refusals)
            rig_.server.refusals.extend([410] * status)
            rig_.source._version = "1"
            await rig_.server.cut()
            rig_.server._slices.pop("s-1")  # as if it had happened long ago
            rig_.server.advance()
            rig_.server.compact()
            if kind is SliceSource:
                await rig_.sees(2)
                assert rig_.server.lists == 2
            else:
                await rig_.stays(1, 2)


@pytest.mark.parametrize("bookmarks", [True, False])
async def test_a_bookmark_saves_a_new_list(bookmarks: bool, tmp_path: Path) -> None:
    """Control: without bookmarks the version of a quiet service grows old, and all is listed again."""
    async with running(tmp_path, slice_of("s-1", [pod(1)])) as rig_:
        rig_.server.bookmarks = bookmarks
        await rig_.source.read()
        for _ in range(50):
            rig_.server.advance()
        async with rig_.watching():
            await until(lambda: not bookmarks or rig_.source._version == str(rig_.server.version))
            rig_.server.compact()
            await rig_.server.cut()
            await rig_.server.put(slice_of("s-2", [pod(2)]))
            await rig_.sees(1, 2)
        assert rig_.server.lists == (1 if bookmarks else 2)


@pytest.mark.parametrize("replaced", [True, False])
async def test_the_token_is_read_again_for_each_call(replaced: bool, tmp_path: Path) -> None:
    """Control: with the old one nothing is answered."""
    async with running(tmp_path, slice_of("s-1", [pod(1)])) as rig_, rig_.watching():
        rig_.server.token = "a new one"
        if replaced:
            rig_.token_file.write_text("a new one")
        await rig_.server.cut()
        await rig_.server.put(slice_of("s-1", [pod(2)]))
        await (rig_.sees(2) if replaced else rig_.stays(1))


async def test_attempts_become_rare_and_are_soon_again_after_an_event(tmp_path: Path) -> None:
    async with running(tmp_path, slice_of("s-1", [pod(1)])) as rig_, rig_.watching():
        rig_.server.refusals.extend([500] * 9)
        await rig_.server.cut()
        await until(lambda: len(rig_.pauses) >= 10)
        await rig_.server.put(slice_of("s-1", [pod(2)]))
        await rig_.sees(2)
        before = len(rig_.pauses)
        await rig_.server.cut()
        await until(lambda: len(rig_.pauses) > before)
    rising = rig_.pauses[:9]
    assert rising == sorted(rising)
    assert (rising[0], max(rig_.pauses)) == (0.5, 30.0)
    assert rig_.pauses[before] <= 1.0


@pytest.mark.parametrize(("limit", "what"), [("_MAX_PAGE_BYTES", "an answer"), ("_MAX_EVENT_BYTES", "an event")])
async def test_what_is_too_long_is_not_taken_in(
    limit: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, slice_of("s-1", [pod(1)])) as rig_:
        monkeypatch.setattr(kubernetes_api, limit, 1_000)
        rig_.server.lines.append(b" " * 2_000)
        with pytest.raises(ApiError, match=f"{what} of the API server is over 1,000 bytes"):
            if what == "an event":
                _ = [line async for line in rig_.api.changes(SERVICE, "1")]
            else:
                await rig_.server.put(slice_of("s-2", [pod(number) for number in range(20)]))
                await rig_.api.page(SERVICE, "")


async def test_a_list_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_watch, "_MAX_PAGES", 2)
    slices = [slice_of(f"s-{number}", [pod(number)]) for number in range(4)]
    async with running(tmp_path, *slices) as rig_:
        rig_.server.page_slices = 1
        assert await rig_.source.read() == ()
        rig_.server.page_slices = 2
        await rig_.source._list()
        await rig_.sees(0, 1, 2, 3)


async def test_a_watch_that_says_nothing_is_begun_again(tmp_path: Path) -> None:
    """Control: without a bound a connection that died in silence would be listened to for ever."""
    async with running(tmp_path, slice_of("s-1", [pod(1)])) as rig_:
        rig_.server.bookmarks = False
        api = KubernetesApi(rig_.api.url, rig_.token_file, None, watch_s=1, slack_s=-0.6)
        with pytest.raises(ApiError, match="cannot be asked"):
            _ = [line async for line in api.changes(SERVICE, str(rig_.server.version))]


async def test_the_server_is_known_by_its_certificate(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server = SliceServer()
    await server.put(slice_of("s-1", [pod(1)]))
    (tmp_path / "token").write_text("token")
    async with server.running(context) as address:
        for signed_by, is_taken in ((authority, True), (other, False)):
            signed_by.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
            source = SliceSource(SERVICE, KubernetesApi(address, tmp_path / "token", tmp_path / "ca.crt"))
            assert await source.read() == ((url(1),) if is_taken else ())


async def test_a_pod_that_ends_answers_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    """All the way: a slice, the source, the directory, the fleet, and real workers over sockets."""
    async with (
        several(tmp_path, frontends=0, pause_s=PAUSE_S) as (a, b),
        running(tmp_path, slice_of("s-1", [pod(1)])) as rig_,
        rig_.watching(),
    ):
        places = {url(1): a.listener.address, url(2): b.listener.address}
        frontend = Frontend()
        frontend.fleet = Fleet()
        frontend.members = Membership(frontend.fleet, lambda address: connect(places[address]))
        directory = WorkerDirectory([], [rig_.source], sleep=lambda _: asyncio.sleep(0.01))
        for address in await directory.open():
            await frontend.members.join(address)
        following = asyncio.create_task(frontend.members.run(directory.lists()))
        await until(lambda: frontend.serving == {a.listener.address})
        with standing([a]):
            stream = await frontend.submit(1)
            await rig_.server.put(slice_of("s-1", [pod(1, is_terminating=True), pod(2)]))
            await until(lambda: frontend.serving == {b.listener.address})
            assert frontend.linked == set(places.values()), "it is still listened to"
            assert await tokens(await frontend.submit(2)) == expected([2])
        assert await tokens(stream) == expected([1])
        await until(lambda: frontend.linked == {b.listener.address})
        assert [one.engine.submissions for one in (a, b)] == [1, 1]
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await frontend.members.close()


def test_outside_of_a_cluster_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST is not set"):
        api_of_cluster()
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    for host, found in (("10.0.0.1", "https://10.0.0.1:6443"), ("fd00::1", "https://[fd00::1]:6443")):
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        assert api_of_cluster().url == found
