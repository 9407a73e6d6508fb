"""URLs as a client or a server may write them: whatever is accepted, every parser reads alike (threats S2).

The first record is a URL, the second where its server redirects to.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from random import Random
from typing import Final
from urllib.parse import unquote, urljoin, urlsplit

import yarl

from semel.errors import RequestError
from semel.media.fetch.address import Address, is_public
from semel.media.fetch.policy import MediaPolicy
from semel.media.fetch.url import FileUrl, Url, WebUrl, parse_url
from tools.fuzz.mutation import edited_text
from tools.fuzz.oracle import check_message, expect
from tools.fuzz.records import join, split

_POLICY: Final = MediaPolicy.of(domains=["*", "*:8080"], allow_http=True)
_PORTS: Final = {"http": 80, "https": 443}
_WORDS: Final = (
    *(
        *("http://", "https://", "HTTPS:", "file:///", "//", "/", "\\", "@", ":", "?", "#", "%", "..", "/../", "."),
        "[::1]",
    ),
    *("127.0.0.1", "0x7f.1", "2130706433", "0177.0.0.1", "127.1", "[::ffff:127.0.0.1]", "[fe80::1%25eth0]", "①", "。"),
    *("example.com", "localhost", "xn--", "ß", "é", "ı", "\u200d", ":443", ":80", ":65536", ":0", "%2e", "%00", "%2f"),
    *("user:pw@", "\t", "\n", " ", "\0", "．", "／", "＠", "metadata", "a_b", "-", "[", "]", "::", "ẞ", "\ud800"),
)


def run(data: bytes) -> None:
    text, location = [*(record.decode(errors="surrogateescape") for record in split(data)), "", ""][:2]
    url = _read(text)
    if isinstance(url, WebUrl):
        _check_web(text, url)
        _check_redirect(url, location)
    elif isinstance(url, FileUrl):
        _check_file(text, url)


def _read(text: str) -> Url | None:
    try:
        return parse_url(text)
    except RequestError as error:
        check_message(error)
        return None


def _check_web(text: str, url: WebUrl) -> None:
    full = url.origin + url.target
    expect(parse_url(full) == url, f"{url!r} is read differently when it is read again")
    check_parsers(text, url)
    check_parsers(full, url)
    expect(len([*_readings(full, url.scheme)]) == 2, f"{full!r} is refused by another parser")
    sent = yarl.URL(full, encoded=True)
    expect((sent.raw_host, sent.port) == (url.host, url.port), f"{sent!r} would be fetched for {url!r}")
    _check_address(url)


def check_parsers(text: str, url: WebUrl) -> None:
    """Neither the parser of the standard library nor that of the HTTP client sees another host or port."""
    for host, port in _readings(text, url.scheme):
        expect(host == _canonical(url.host), f"{text!r} leads to {url.host!r}, others read {host!r}")
        expect(port == url.port, f"{text!r} leads to port {url.port}, others read {port}")


def _readings(text: str, scheme: str) -> Iterator[tuple[str, int | None]]:
    """What other parsers read; one that refuses the text goes nowhere."""
    with suppress(ValueError):
        split_ = urlsplit(text)
        yield _canonical(split_.hostname or ""), split_.port or _PORTS[scheme]
    with suppress(ValueError):
        client = yarl.URL(text)
        yield _canonical(client.raw_host or ""), client.port


def _canonical(host: str) -> str:
    if not host.isascii():
        host = yarl.URL.build(scheme="http", host=host).raw_host or ""
    host = host.removesuffix(".").lower()
    return str(ip_address(host)) if ":" in host else host


def _check_address(url: WebUrl) -> None:
    """What a resolver would take for a number is the number that is checked, and only public ones pass."""
    number: Address | None
    try:
        number = ip_address(socket.inet_aton(url.host))
    except (OSError, ValueError):
        number = url.address
    expect(number == url.address, f"{url.host!r} is {number} to a resolver")
    try:
        _POLICY.check(url)
    except RequestError as error:
        check_message(error)
        return
    expect(url.address is None or is_public(url.address), f"{url.host!r} passes, and is not public (S1)")


def _check_redirect(url: WebUrl, location: str) -> None:
    try:
        target = url.join(location)
    except RequestError as error:
        check_message(error)
        return
    joined = urljoin(url.origin + url.target, location)
    check_parsers(joined, target)
    _check_address(target)


def _check_file(text: str, url: FileUrl) -> None:
    expect(url.path.startswith("/") and ".." not in url.path.split("/"), f"{url!r} leads out (S1)")
    expect("\0" not in url.path, f"{url!r} has an end in its middle")
    expect(unquote(urlsplit(text).path) == url.path, f"{text!r} is read as {url!r}")


def mutate(data: bytes, random: Random) -> bytes | None:
    """Write words of URLs into the URL or into the redirect."""
    records = [*split(data), b"", b""][:2]
    at = random.randrange(2)
    text = edited_text(records[at].decode(errors="surrogateescape"), random, _WORDS)
    records[at] = text.encode(errors="surrogatepass")
    return join(records)


def seeds() -> Mapping[str, bytes]:
    """Forms that are accepted, and what parsers have disagreed on."""
    urls = {
        "https": ("https://example.com/a.png?b=c", "/d"),
        "port": ("http://media.example.com:8080", "//other.example.com/x"),
        "ipv4": ("http://93.184.216.34/", "http://127.0.0.1/"),
        "ipv6": ("https://[2606:2800:220:1::1]:8080/a", "../b/./c?d"),
        "mapped": ("https://[::ffff:127.0.0.1]/", "?e=f"),
        "idna": ("https://bücher.example/ä", "https://xn--bcher-kva.example"),
        "dot": ("https://Example.COM./%7Ea#fragment", "b#c"),
        "user": ("https://example.com@127.0.0.1/", "https://a:b@example.com"),
        "backslash": ("https://example.com\\@127.0.0.1/", "\\\\127.0.0.1/"),
        "number": ("http://2130706433/", "http://0x7f.1"),
        "file": ("file:///data/a%20b.png", "file:///etc/passwd"),
    }
    return {name: join([url.encode(), location.encode()]) for name, (url, location) in urls.items()}
