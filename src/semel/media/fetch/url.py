"""Media URLs: the only place that parses them (threats S2).

A URL is parsed once and strictly into a value. Checks use this value, and so does the request; the string is not used
again. Anything that two parsers might read differently (a backslash, a space, an IPv4 address in hexadecimal, a user's
name) is refused, not interpreted. Fragments are dropped. The policy is elsewhere: see `policy`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, cast
from urllib.parse import unquote_to_bytes

from semel.errors import InvalidRequest
from semel.media.fetch.address import Address, parse_address

__all__ = ["FileUrl", "Scheme", "Url", "WebUrl", "parse_host", "parse_url"]

Scheme = Literal["http", "https"]

_MAX_CHARS: Final = 8_192
_MAX_HOST_CHARS: Final = 253
_DEFAULT_PORTS: Final[dict[str, int]] = {"http": 80, "https": 443}
_LABEL: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_WEB: Final = re.compile(r"(?P<scheme>https?)://(?P<authority>[^/?#]*)(?P<target>[^#]*)", re.IGNORECASE)
_FILE: Final = re.compile(r"file://(?P<host>|localhost)(?P<path>/[^?#]*)", re.IGNORECASE)
_AUTHORITY: Final = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(?::(?P<port>[1-9][0-9]{0,4}))?")
_TARGET: Final = re.compile(r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?\[\]]|%[0-9A-Fa-f]{2})*")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_RELATIVE: Final = re.compile(rf"(?![^/?#]*:){_TARGET.pattern}(?:#.*)?", re.DOTALL)
_EXCERPT_CHARS: Final = 64


@dataclass(frozen=True, slots=True)
class WebUrl:
    """A URL of a web server."""

    scheme: Scheme
    host: str
    """Lower case, international names in ASCII form, without a final dot; an address is in its shortest form."""

    port: int
    target: str
    """Path and query, as sent in the request."""

    @property
    def address(self) -> Address | None:
        """The host as an address; None if it is a name."""
        return parse_address(self.host)

    @property
    def path(self) -> str:
        """The target without the query."""
        return self.target.partition("?")[0]

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}" + ("" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}")

    def __str__(self) -> str:
        """For the log: without the query, which is a secret in signed URLs."""
        return self.origin + self.path[:_EXCERPT_CHARS]

    def join(self, location: str) -> WebUrl:
        """Return the target of a redirect from here; anything but a web URL is refused."""
        if location.startswith("//"):
            location = f"{self.scheme}:{location}"
        elif location.startswith("/"):
            location = self.origin + location
        elif location.startswith("?"):
            location = self.origin + self.path + location
        elif not _SCHEME.match(location):
            # Before dots are removed: a segment that other parsers take for a scheme must not vanish with them.
            if not _RELATIVE.fullmatch(location):
                raise InvalidRequest("the URL redirects to what is no plain URL")
            location = self.origin + _without_dots(self.path.rpartition("/")[0] + "/" + location)
        url = parse_url(location)
        if not isinstance(url, WebUrl):
            raise InvalidRequest("the URL redirects to something that is not on the web")
        return url


@dataclass(frozen=True, slots=True)
class FileUrl:
    """A file on the frontend's machine."""

    path: str
    """Absolute and without `..`."""


Url = WebUrl | FileUrl


def parse_url(text: str) -> Url:
    """Parse a URL of scheme http, https or file."""
    if len(text) > _MAX_CHARS:
        raise InvalidRequest(f"the URL has {len(text):,} characters; the limit is {_MAX_CHARS:,}")
    if (found := _WEB.match(text)) is not None:
        return _web(found)
    if text[:5].lower() == "file:":
        return _file(text)
    raise InvalidRequest(f"{_excerpt(text)} is not a URL of a known scheme: send https://…, or a data URL")


def _web(found: re.Match[str]) -> WebUrl:
    scheme = cast("Scheme", found["scheme"].lower())
    authority = found["authority"]
    if "@" in authority:
        raise InvalidRequest("the URL has a user's name or password before its host: leave it out")
    parts = _AUTHORITY.fullmatch(authority)
    port = int(parts["port"] or _DEFAULT_PORTS[scheme]) if parts is not None else 0
    if parts is None or port > 65_535:
        raise InvalidRequest(f"{_excerpt(authority)} is not a host, nor a host and a port, of a URL")
    target = found["target"]
    if not _TARGET.fullmatch(target):
        raise InvalidRequest("the URL's path or query has characters that must be percent-encoded (%20 for a space)")
    return WebUrl(scheme, parse_host(parts["host"]), port, target if target.startswith("/") else f"/{target}")


def parse_host(text: str) -> str:
    """Return the canonical form of a host: a name, an IPv4 address, or an IPv6 address (in brackets in the text)."""
    if text.startswith("["):
        address = parse_address(text[1:-1])
        if address is None or ":" not in text:
            raise InvalidRequest(f"{_excerpt(text)} is not an IPv6 address")
        return str(address)
    host = (text if text.isascii() else _ascii(text)).lower().removesuffix(".")
    labels = host.split(".")
    if len(host) > _MAX_HOST_CHARS or not all(map(_LABEL.fullmatch, labels)):
        raise InvalidRequest(f"{_excerpt(text)} is not the name of a host")
    if _NUMBER.fullmatch(labels[-1]) and parse_address(host) is None:
        # Some resolvers read these as addresses: to them 2130706433, 0x7f.1 and 127.1 are all 127.0.0.1.
        raise InvalidRequest(f"{_excerpt(text)} is not an IPv4 address: write it as four decimal numbers")
    return host


def _ascii(text: str) -> str:
    import idna

    try:
        return idna.encode(text, uts46=True, std3_rules=True, transitional=False).decode("ascii")
    except UnicodeError:  # the base class of idna's errors
        raise InvalidRequest(f"{_excerpt(text)} is not the name of a host") from None


def _file(text: str) -> FileUrl:
    found = _FILE.fullmatch(text)
    if found is None or not _TARGET.fullmatch(found["path"]):
        raise InvalidRequest("a file's URL has the form file:///path, percent-encoded, without host, query or fragment")
    try:
        path = unquote_to_bytes(found["path"]).decode()
    except UnicodeDecodeError:
        raise InvalidRequest("the path of a file's URL must be UTF-8, percent-encoded") from None
    if "\0" in path or ".." in path.split("/"):
        raise InvalidRequest("the path of a file's URL must have neither .. nor %00 in it")
    return FileUrl(path)


def _without_dots(target: str) -> str:
    """Return a target whose path has no `.` and `..`, removed as in RFC 3986 (5.2.4)."""
    path, mark, query = target.partition("?")
    kept: list[str] = []
    segments = path.split("/")[1:]
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    if segments[-1] in (".", ".."):
        kept.append("")
    return "/" + "/".join(kept) + mark + query


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "…")
