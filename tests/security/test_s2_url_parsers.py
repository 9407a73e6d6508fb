"""S2: the host that is checked is the host that is connected to, however a URL is written."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from yarl import URL

from semel.errors import InvalidRequest, MediaNotAllowed
from semel.media.fetch.url import WebUrl, parse_url
from tests.media.origin import Names, fetcher, get, origin
from tests.security.naive import naive_fetch

FORMS = [
    *("http://good.example\\@evil.example/", "http://good.example\\.evil.example/"),
    *("http://evil.example\\good.example/", "http://evil.example#@good.example/"),
    *("http://evil.example?@good.example/", "http://evil.example/@good.example/"),
    *("http://good.example@evil.example/", "http://good.example:80@evil.example/"),
    *("http://evil.example:80#@good.example:80/", "http://evil.example\t@good.example/", "http://evil.exam\nple/"),
    *("http://evil.example\r\n.good.example/", " http://evil.example/", "http://good.example /"),
    *("http://evil.example%2f@good.example/", "http://evil.example%23.good.example/"),
    *("http://evil.example%00.good.example/", "http://%65vil.example/", "http://evil。example/"),
    *("http://ｅｖｉｌ.example/", "http://eviⅼ.example/", "http://EVIL.example./", "http://evil.example../"),
    *("http://①②⑦.0.0.1/", "http://１２７.0.0.1/", "http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/"),
    *("http://127.1/", "http://127.0.0.1./", "http://[::1]/", "http://[::ffff:127.0.0.1]/"),
    *("http://[::ffff:7f00:1]/", "http://[::1%25lo]/", "http://[::1]good.example/", "http://[127.0.0.1]/"),
    *("http://good.example:80:81/", "http://good.example:８０/", "http://good.example:/", "http:///good.example/"),
    *("http:good.example/", "http:/\\good.example/", "http:\\\\good.example/", "HTTP://good.example/"),
    *("http://xn--evil-.example/", "http://faß.example/", "http://gоod.example/", "http://good.example\ufeff/"),
    *("http://go\u00adod.example/", "http://good\u2024example/", "http://good.example/\\..\\evil"),
    "http://a:b@c@good.example/",
]


def host_by_urllib(text: str) -> str | None:
    try:
        return urlsplit(text).hostname
    except ValueError:
        return None


def host_by_aiohttp(text: str) -> str | None:
    try:
        return URL(text).raw_host
    except ValueError:
        return None


def test_control_two_parsers_disagree_on_many_of_these_forms() -> None:
    """Who checks with one of them and fetches with the other is fooled: CVE-2026-24779, CVE-2026-25960."""
    disagreed = [form for form in FORMS if host_by_urllib(form) != host_by_aiohttp(form)]
    assert len(disagreed) >= 8, disagreed


async def test_control_checking_with_one_parser_and_fetching_with_another_reaches_what_is_forbidden() -> None:
    async with origin() as inside:
        inside["/"] = b"secret"
        with pytest.raises(PermissionError):
            await naive_fetch(inside.url(), forbidden={"127.0.0.1"})
        for host in ("１２７.0.0.1", "①②⑦.0.0.1"):
            assert await naive_fetch(inside.url("/", host), forbidden={"127.0.0.1"}) == b"secret"
            async with fetcher("*", f"*:{inside.port}") as fetching:
                with pytest.raises(MediaNotAllowed):
                    await get(fetching, inside.url("/", host))
        assert len(inside.seen) == 2


@pytest.mark.parametrize("form", FORMS)
async def test_a_form_is_refused_or_the_host_that_is_checked_is_the_one_that_is_looked_up(form: str) -> None:
    try:
        url = parse_url(form)
    except InvalidRequest:
        return
    assert isinstance(url, WebUrl)
    names = Names()
    async with fetcher(url.host if ":" not in url.host else f"[{url.host}]", lookup=names, networks=()) as fetching:
        with pytest.raises(MediaNotAllowed):  # no name resolves here, and no address of these is public
            await get(fetching, url)
    assert names.asked == ([] if url.address is not None else [url.host])
    assert url.host.isascii()


@pytest.mark.parametrize("form", FORMS)
async def test_what_goes_over_the_wire_is_the_value_that_was_checked(form: str) -> None:
    """A server on loopback stands for every name: it sees host and target of the value, and nothing of the string."""
    try:
        url = parse_url(form)
    except InvalidRequest:
        return
    assert isinstance(url, WebUrl)
    if url.address is not None:
        return
    async with origin() as server:
        url = WebUrl(url.scheme, url.host, server.port, url.target)
        server[url.target.partition("?")[0]] = b"a"
        names = Names(**{url.host: [["127.0.0.1"]]})
        async with fetcher(f"{url.host}:{server.port}", lookup=names) as fetching:
            assert await get(fetching, url) == b"a"
        assert server.seen[0].headers["host"] == f"{url.host}:{server.port}"
        assert server.seen[0].target == url.target
