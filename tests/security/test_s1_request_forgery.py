"""S1: nobody makes a frontend ask for something in its own network by naming it as media."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from semel.errors import MediaNotAllowed
from tests.media.origin import Names, Origin, fetcher, get, origin, reply
from tests.security.naive import naive_fetch

SECRET = b"credentials"


@pytest.fixture
async def inside() -> AsyncIterator[Origin]:
    """A server that outsiders must not reach."""
    async with origin() as made:
        made["/latest/meta-data"] = SECRET
        yield made


async def test_control_a_client_without_a_policy_fetches_from_its_own_machine(inside: Origin) -> None:
    assert await naive_fetch(inside.url("/latest/meta-data")) == SECRET


@pytest.mark.parametrize("domains", [(), ("*",), ("*", "*:{port}"), ("cat.example:{port}", "*:{port}")])
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "localhost", "evil.example", "0.0.0.0"])
async def test_whatever_public_hosts_are_allowed_nothing_inside_is_reached(
    inside: Origin, domains: tuple[str, ...], host: str
) -> None:
    names = Names(localhost=[["127.0.0.1"]], evil_example=[["127.0.0.1", "::1"]])
    rules = [domain.format(port=inside.port) for domain in domains]
    async with fetcher(*rules, networks=(), lookup=names) as fetching:
        with pytest.raises(MediaNotAllowed):
            await get(fetching, inside.url("/latest/meta-data", host))
    assert inside.connections == 0
    assert not inside.seen


async def test_a_network_that_is_open_to_one_host_is_not_open_to_any_name_that_points_into_it(inside: Origin) -> None:
    names = Names(store_example=[["127.0.0.1"]], evil_example=[["127.0.0.1"]])
    async with fetcher("*", f"*:{inside.port}", f"store.example:{inside.port}", lookup=names) as fetching:
        assert await get(fetching, inside.url("/latest/meta-data", "store.example")) == SECRET
        for host in ("evil.example", "127.0.0.1"):
            with pytest.raises(MediaNotAllowed):
                await get(fetching, inside.url("/latest/meta-data", host))
    assert len(inside.seen) == 1


async def test_whether_a_host_inside_exists_is_not_told_S7(inside: Origin) -> None:
    """One text for a name that does not resolve and for one that resolves to what may not be reached."""
    names = Names(db_corp=[["10.0.0.5"]], here_corp=[["127.0.0.1"]], six_corp=[["fd00::1"]])
    told = set()
    async with fetcher("*", f"*:{inside.port}", networks=(), lookup=names) as fetching:
        for host in ("db.corp", "here.corp", "six.corp", "none.corp"):
            with pytest.raises(MediaNotAllowed) as caught:
                await get(fetching, inside.url("/", host))
            told.add((type(caught.value), str(caught.value)))
    assert len(told) == 1
    assert "10.0.0.5" not in str(told)


async def test_no_name_is_looked_up_for_a_host_that_is_not_allowed(inside: Origin) -> None:
    """Or a request could send words to whoever runs the name server of a domain."""
    names = Names(allowed_example=[["127.0.0.1"]])
    async with fetcher("allowed.example", lookup=names) as fetching:
        for url in (
            "https://secret.evil.example/",
            "http://allowed.example:81/",
            "https://allowed.example.evil.example/",
        ):
            with pytest.raises(MediaNotAllowed):
                await get(fetching, url)
    assert names.asked == []


async def test_the_environment_s_proxy_is_not_asked(inside: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would connect for us, to where nobody checks."""
    async with origin() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url())
        inside["/"] = b"direct"
        async with fetcher(f"127.0.0.1:{inside.port}") as fetching:
            assert await get(fetching, inside.url()) == b"direct"
        assert not proxy.seen


async def test_what_a_server_inside_says_of_itself_is_not_told_S7(inside: Origin) -> None:
    inside["/a"] = reply(b"internal words", 403, server="vault/1.2", www_authenticate="Basic realm=internal")
    async with fetcher(f"127.0.0.1:{inside.port}") as fetching:
        with pytest.raises(Exception, match="status 403") as caught:
            await get(fetching, inside.url("/a"))
    assert not any(word in str(caught.value) for word in ("internal", "vault", "realm"))
