"""S3: a connection goes to the address that was checked, on every hop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest

from semel.errors import MediaNotAllowed, MediaUnavailable
from semel.media.fetch.connector import CheckedConnector
from semel.media.fetch.policy import MediaPolicy
from tests.media.origin import LIMITS, Names, Origin, fetcher, get, origin, reaching, reply, trusting
from tests.security.naive import naive_fetch

SECRET = b"credentials"
OUTSIDE, INSIDE = "127.0.0.2", "127.0.0.1"
"""Two addresses of loopback: one stands for the internet and is allowed as a network, the other must not be reached."""


@pytest.fixture
async def inside() -> AsyncIterator[Origin]:
    async with origin(INSIDE) as made:
        made["/"] = made["/latest/meta-data"] = SECRET
        yield made


@pytest.fixture
async def outside() -> AsyncIterator[Origin]:
    async with origin(OUTSIDE) as made:
        yield made


async def test_a_name_that_changes_its_address_between_check_and_connection_fools_the_naive_and_not_us(
    inside: Origin,
) -> None:
    rebinding = {"evil_example": [[OUTSIDE], [INSIDE]]}
    url = inside.url("/", "evil.example")
    assert await naive_fetch(url, lookup=Names(**rebinding), forbidden={INSIDE}) == SECRET

    names = Names(**rebinding)
    async with fetcher(f"evil.example:{inside.port}", networks=[f"{OUTSIDE}/32"], lookup=names) as fetching:
        with pytest.raises((MediaUnavailable, MediaNotAllowed)):  # nobody listens at that port of the outside
            await get(fetching, url)
    assert len(inside.seen) == 1  # the naive one


async def test_of_a_name_s_addresses_only_the_allowed_ones_are_tried(inside: Origin, outside: Origin) -> None:
    """The one inside listens at the same port, and comes first."""
    outside["/"] = b"cat"
    names = Names(cat_example=[[INSIDE, "169.254.169.254", "::1", "fe80::1%lo", OUTSIDE]])
    async with fetcher(f"cat.example:{outside.port}", networks=[f"{OUTSIDE}/32"], lookup=names) as fetching:
        assert await get(fetching, outside.url("/", "cat.example")) == b"cat"
    assert not inside.connections


async def test_control_a_client_that_follows_redirects_itself_goes_inside(inside: Origin, outside: Origin) -> None:
    outside["/go"] = reply(b"", 302, location=inside.url("/latest/meta-data"))
    assert await naive_fetch(outside.url("/go"), hosts={OUTSIDE}, forbidden={INSIDE}) == SECRET


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_inside_is_not_followed(inside: Origin, outside: Origin, status: int) -> None:
    outside["/go"] = reply(b"", status, location=inside.url("/latest/meta-data"))
    for domains in ((), ("*", f"*:{inside.port}")):
        rules = (f"{OUTSIDE}:{outside.port}", *domains)
        async with fetcher(*rules, networks=[f"{OUTSIDE}/32"]) as fetching:
            with pytest.raises(MediaNotAllowed) as caught:
                await get(fetching, outside.url("/go"))
            assert INSIDE not in str(caught.value)
    assert not inside.connections


@pytest.mark.parametrize(
    "location",
    [
        *("http://169.254.169.254/latest/meta-data/", "http://[fd00:ec2::254]/", "http://[::ffff:169.254.169.254]/"),
        *("http://0/", "http://metadata.google.internal/", "//127.0.0.1/", "\\\\127.0.0.1\\", "file:///etc/passwd"),
        *("data:image/png;base64,AAAA", "gopher://127.0.0.1:6379/_FLUSHALL", "http://user@127.0.0.2/"),
        *("http://127.0.0.2:22/", "https://127.0.0.2\t/"),
    ],
)
async def test_a_redirect_to_what_no_request_may_name_is_not_followed_and_not_repeated_S7(
    outside: Origin, location: str
) -> None:
    outside["/go"] = reply(b"", 302, location=location)
    names = Names(metadata_google_internal=[["169.254.169.254"]])
    async with fetcher(f"{OUTSIDE}:{outside.port}", "*", networks=[f"{OUTSIDE}/32"], lookup=names) as fetching:
        with pytest.raises(MediaNotAllowed) as caught:
            await get(fetching, outside.url("/go"))
    told = str(caught.value)
    assert not any(word in told for word in ("169.254", "passwd", "metadata", "6379", "user", ":22"))
    assert len(outside.seen) == 1


async def test_a_redirect_from_https_to_http_is_not_followed(outside: Origin) -> None:
    async with origin(tls=True) as secure:
        secure["/go"] = reply(b"", 302, location=outside.url("/"))
        outside["/"] = b"cat"
        names = Names(cat_example=[[INSIDE]])
        rules = (f"cat.example:{secure.port}", f"{OUTSIDE}:{outside.port}")
        networks = [f"{INSIDE}/32", f"{OUTSIDE}/32"]
        async with fetcher(*rules, networks=networks, lookup=names, tls=trusting()) as fetching:
            with pytest.raises(MediaNotAllowed, match="https to http"):
                await get(fetching, secure.url("/go", "cat.example"))
    assert not outside.seen


async def test_redirects_are_few(outside: Origin) -> None:
    for number in range(6):
        outside[f"/{number}"] = reply(b"", 302, location=f"/{number + 1}")
    outside["/6"] = b"cat"
    async with fetcher(f"{OUTSIDE}:{outside.port}", networks=[f"{OUTSIDE}/32"]) as fetching:
        assert await get(fetching, outside.url("/3")) == b"cat"
        outside.seen.clear()
        with pytest.raises(MediaUnavailable, match="more than 3 times"):
            await get(fetching, outside.url("/2"))
        assert outside.targets == ["/2", "/3", "/4", "/5"]


async def test_all_hops_share_one_limit_of_time(outside: Origin) -> None:
    """Or a chain of hops would take as often as long."""
    outside["/go"] = reply(b"", 302, location="/go")
    limits = replace(LIMITS, total_s=0.3, max_redirects=1_000_000)
    async with fetcher(f"{OUTSIDE}:{outside.port}", networks=[f"{OUTSIDE}/32"], limits=limits) as fetching:
        with pytest.raises(MediaUnavailable, match="took too long"):
            await get(fetching, outside.url("/go"))


async def test_the_connection_itself_refuses_an_address_whoever_asks_for_it(inside: Origin) -> None:
    """The last line: a bug above it, here a session that is used without any check, connects to nothing inside."""
    for domains, networks in (((), ()), (("store.example",), (f"{OUTSIDE}/32",))):
        policy = MediaPolicy.of(domains=domains, networks=networks, allow_http=True)
        connector = CheckedConnector(policy, Names(), connections=1, connections_per_host=1)
        async with aiohttp.ClientSession(connector=connector) as session:
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.get(inside.url())
    assert not inside.connections


async def test_nothing_is_sent_over_a_connection_whose_peer_the_host_may_not_have(inside: Origin) -> None:
    """Loopback is open to another host here: a socket can be made, and the peer is still looked at."""
    policy = MediaPolicy.of(domains=["store.example"], networks=[f"{INSIDE}/32"], allow_http=True)
    connector = CheckedConnector(policy, Names(), connections=1, connections_per_host=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        with pytest.raises(MediaNotAllowed):
            await session.get(inside.url())
    assert not inside.seen


async def test_a_hop_may_lead_to_another_allowed_host(inside: Origin, outside: Origin) -> None:
    outside["/go"] = reply(b"", 302, location=inside.url("/"))
    rules = (f"{OUTSIDE}:{outside.port}", f"{INSIDE}:{inside.port}")
    async with fetcher(*rules, networks=["127.0.0.0/30"]) as fetching:
        assert await get(fetching, outside.url("/go")) == SECRET
    async with reaching(outside, networks=[f"{OUTSIDE}/32"]) as fetching:
        with pytest.raises(MediaNotAllowed):
            await get(fetching, outside.url("/go"))


@pytest.mark.parametrize("headers", [{}, {"location": ""}])
async def test_a_redirect_to_nowhere_is_no_answer(outside: Origin, headers: dict[str, str]) -> None:
    outside["/go"] = reply(b"", 302, **headers)
    async with fetcher(f"{OUTSIDE}:{outside.port}", networks=[f"{OUTSIDE}/32"]) as fetching:
        with pytest.raises((MediaUnavailable, MediaNotAllowed)):
            await get(fetching, outside.url("/go"))
