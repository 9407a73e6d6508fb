"""Who a client is, which proxies are believed, and which hosts a request may name (S25)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from semel.errors import ConfigError
from semel.lab.bench.ports import free_port
from semel.web.host_check import HostCheck, allowed_hosts_at, is_allowed_host
from semel.web.peers import PeerSettings, network_of, parse_networks, plain_address
from semel.web.server import HttpServer
from tests.waiting import until


def test_one_client_is_an_ipv4_address_or_a_network_of_ipv6() -> None:
    assert network_of("203.0.113.7") == network_of("::ffff:203.0.113.7") == "203.0.113.7"
    assert network_of("2001:db8:1:2::3") == network_of("2001:db8:1:2:ffff::4") == "2001:db8:1:2::/64"
    assert network_of("2001:db8:1:2::3") != network_of("2001:db8:1:3::3")
    assert network_of("fe80::1%eth0") == "fe80::/64"
    assert network_of("::1") == "::1"
    assert plain_address("::ffff:10.0.0.1") == "10.0.0.1"


@given(st.text(max_size=80))
@settings(deadline=None)
def test_any_text_is_some_client_and_what_is_no_address_is_the_same_one(text: str) -> None:
    assert len(network_of(text)) <= 43


@pytest.mark.parametrize("text", ["*", "proxy", "10.0.0.1/8", "10.0.0.0/33", ""])
def test_what_is_no_network_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--forwarded-allow-ips"):
        parse_networks([text])


class Echo:
    """Answers with the client that it sees."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(scope["client"][0]).encode()})


async def seen_client(proxies: tuple[str, ...], forwarded: str) -> str:
    port = free_port()
    server = HttpServer(Echo(), "127.0.0.1", port, proxies=proxies)
    async with server.running():
        await until(lambda: server._server.started)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"GET / HTTP/1.1\r\nHost: h\r\nX-Forwarded-For: {forwarded}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    return answer.rpartition(b"\r\n\r\n")[2].partition(b"\r\n")[0].decode() or answer.decode()


async def test_a_forwarded_address_is_believed_from_a_named_network_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's own, which is not ours
    assert "127.0.0.1" in await seen_client((), "203.0.113.7")
    assert "127.0.0.1" in await seen_client(("10.0.0.0/8",), "203.0.113.7")
    assert "203.0.113.7" in await seen_client(("127.0.0.0/8",), "203.0.113.7")


async def test_what_the_client_itself_has_written_before_the_proxy_is_not_believed() -> None:
    assert "203.0.113.7" in await seen_client(("127.0.0.0/8",), "192.0.2.66, 203.0.113.7")
    assert "203.0.113.7" in await seen_client(("127.0.0.0/8", "10.0.0.0/8"), "192.0.2.66, 203.0.113.7, 10.1.1.1")


LOCAL = allowed_hosts_at("127.0.0.1", (), has_keys=False)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:8000", "localhost", "LOCALHOST:8000", "localhost.", "[::1]:8000", "[::1]"),
        "a.localhost:1",
    ],
)
def test_this_machine_s_own_names_are_allowed(host: str) -> None:
    assert is_allowed_host(host, LOCAL)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost"),
        *("192.168.1.5:8000", "0.0.0.0:8000", "[::]:8000", "127.0.0.1:8000:9", "evil.example#localhost"),
        *("a@localhost@b", ":"),
    ],
)
def test_any_other_host_is_refused_at_an_address_of_this_machine(host: str) -> None:
    assert not is_allowed_host(host, LOCAL)


def test_what_is_allowed_depends_on_address_keys_and_names() -> None:
    assert allowed_hosts_at("0.0.0.0", (), has_keys=False) == ()
    assert allowed_hosts_at("127.0.0.1", (), has_keys=True) == ()
    assert allowed_hosts_at("127.0.0.1", ("*",), has_keys=False) == ()
    named = allowed_hosts_at("0.0.0.0", ("Chat.example.com", ".example.org"), has_keys=True)
    assert is_allowed_host("chat.example.com:443", named)
    assert is_allowed_host("a.b.example.org", named)
    assert not is_allowed_host("chat.example.com.evil.example", named)
    assert not is_allowed_host("example.com", named)


async def status_of(app: HostCheck, *headers: tuple[bytes, bytes]) -> int:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "client": ("127.0.0.1", 1)}
    await app(scope, None, send)  # type: ignore[arg-type]
    return int(sent[0]["status"])


async def check_rebinding(allowed: tuple[str, ...]) -> None:
    """A page at evil.example whose name has become 127.0.0.1 reads nothing."""
    counted: list[str] = []
    app = HostCheck(Echo(), allowed, (), counted.append)

    async def ask(*hosts: str) -> int:
        return await status_of(app, *((b"host", host.encode()) for host in hosts))

    assert [await ask("localhost:8000"), await ask()] == [200, 200]
    assert [await ask("evil.example:8000"), await ask("localhost", "evil.example")] == [421, 421]
    assert counted == ["misdirected_request"] * 2


async def check_foreign_pages(allowed: tuple[str, ...], origins: tuple[str, ...] = ()) -> None:
    """A page at evil.example posts to 127.0.0.1, and does not care that it cannot read the answer."""
    counted: list[str] = []
    app = HostCheck(Echo(), allowed, origins, counted.append)

    async def ask(*headers: tuple[bytes, bytes]) -> int:
        return await status_of(app, (b"host", b"127.0.0.1:8000"), *headers)

    ours = [b"http://localhost:3000", b"http://127.0.0.1:8000", b"https://[::1]:8000", *map(str.encode, origins)]
    assert [await ask()] + [await ask((b"origin", one)) for one in ours] == [200] * (len(ours) + 1)
    foreign = [
        *(b"https://evil.example", b"null", b"", b"chrome-extension://x", b"https://localhost.evil.example"),
        b"localhost",
    ]
    assert [await ask((b"origin", one)) for one in foreign] == [403] * len(foreign)
    assert await ask((b"origin", ours[0]), (b"origin", foreign[0])) == 403
    assert counted == ["foreign_origin"] * (len(foreign) + 1)


@pytest.mark.parametrize("origins", [(), ("https://chat.example",)])
async def test_a_page_of_another_host_is_refused_and_counted_S25(origins: tuple[str, ...]) -> None:
    await check_foreign_pages(LOCAL, origins)


async def test_mutant_an_app_that_takes_any_origin_works_for_the_page() -> None:
    with pytest.raises(AssertionError):
        await check_foreign_pages(LOCAL, ("*",))


async def test_a_page_that_rebinds_its_name_is_refused_and_counted_S25() -> None:
    await check_rebinding(LOCAL)


async def test_mutant_an_app_that_takes_any_host_answers_the_page() -> None:
    with pytest.raises(AssertionError):
        await check_rebinding((".example",))


def test_networks_come_one_by_one_or_with_commas() -> None:
    found = PeerSettings(forwarded_allow_ips=("10.0.0.0/8,192.0.2.1", "2001:db8::/32")).proxies
    assert found == ("10.0.0.0/8", "192.0.2.1/32", "2001:db8::/32")
