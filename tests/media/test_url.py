"""URLs as values: what is read, what is refused, and what a redirect makes of them (S2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import InvalidRequest
from semel.media.fetch.url import FileUrl, WebUrl, parse_host, parse_url


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://example.com", WebUrl("https", "example.com", 443, "/")),
        ("HTTPS://Example.COM:443/A?b#c", WebUrl("https", "example.com", 443, "/A?b")),
        ("http://example.com.:8080/a%2fb", WebUrl("http", "example.com", 8080, "/a%2fb")),
        ("https://example.com?q=1", WebUrl("https", "example.com", 443, "/?q=1")),
        ("https://example.com#f", WebUrl("https", "example.com", 443, "/")),
        ("https://example.com/a@b:c/../d?x=[1]&y=/?", WebUrl("https", "example.com", 443, "/a@b:c/../d?x=[1]&y=/?")),
        ("https://bücher.example/", WebUrl("https", "xn--bcher-kva.example", 443, "/")),
        ("https://BÜCHER。example/", WebUrl("https", "xn--bcher-kva.example", 443, "/")),
        ("https://faß.example/", WebUrl("https", "xn--fa-hia.example", 443, "/")),
        ("https://１２７.0.0.1/", WebUrl("https", "127.0.0.1", 443, "/")),
        ("https://my_bucket.example/", WebUrl("https", "my_bucket.example", 443, "/")),
        ("https://127.0.0.1./", WebUrl("https", "127.0.0.1", 443, "/")),
        ("https://[::1]:1/", WebUrl("https", "::1", 1, "/")),
        ("https://[0:0::FFFF:7f00:1]/", WebUrl("https", "::ffff:7f00:1", 443, "/")),
        ("file:///a/b%20c", FileUrl("/a/b c")),
        ("FILE://localhost/a", FileUrl("/a")),
    ],
)
def test_a_url_is_read_into_its_canonical_value(text: str, expected: object) -> None:
    assert parse_url(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "example.com", "//example.com/", "ftp://example.com/", "gopher://example.com/", "javascript:1"),
        *("jar:x", "https:example.com", "https:/example.com", "https:///example.com", "https://", "https://?a"),
        *("https://:443/", " https://example.com", "https://example.com ", "https://exa mple.com"),
        *("https://example.com/a b", "\thttps://a", "https://exam\nple.com/", "https://example.com/\r\nHost: b"),
        *("https://example.com/\0", "https://a\0b.example/", "https://example.com\\@b.example/"),
        *("https:\\\\example.com", "https://example.com/a\\b", "https://a\\b.example", "https://user@example.com/"),
        *("https://user:pw@example.com/", "https://a@b@example.com/", "https://@example.com"),
        *("https://example%2ecom/", "https://%31%32%37.0.0.1/", "https://a%00.example/"),
        *("https://example.com%23.b.example", "https://2130706433/", "https://0x7f000001/", "https://0177.0.0.1/"),
        *("https://127.1/", "https://127.0.1/", "https://0x7f.0.0.1/", "https://127.0.0.01/", "https://1.2.3.4.5/"),
        *("https://256.0.0.1/", "https://0/", "https://a.0x/", "https://example.1/", "https://①②⑦.1/"),
        *("https://[::1", "https://::1/", "https://[::1%25eth0]/", "https://[fe80::1%eth0]/"),
        *("https://[127.0.0.1]/", "https://[v1.a]/", "https://[::1]a/", "https://[]/", "https://[[::1]]/"),
        *("https://a[::1]/", "https://example.com:/", "https://example.com:0/", "https://example.com:65536/"),
        *("https://example.com:080/", "https://example.com:80:80/", "https://example.com:-1/"),
        *("https://example.com:８０/", "https://example.com:a/", "https://example..com/", "https://.example.com/"),
        *("https://example.com../", "https://-a.example/", "https://a-/", "https://exam|ple.com/"),
        *("https://exam<ple.com/", "https://exam*ple.com/", "https://a,b/", "https://a;b/", "https://example.com/ü"),
        *("https://example.com/%", "https://example.com/%zz", "https://example.com/?a=|"),
        *("https://\u202eexample.com/", "https://a\u2044b.example/", "https://exa\u00admple\ud800.com/"),
        *("https://a／b.example", "https://" + "a" * 64 + ".example/", "https://" + "a." * 127 + "example/"),
        *("https://e.com/" + "a" * 8_192, "file://host/a", "file:a", "file:/a", "file:////../a", "file:///a/../b"),
        *("file:///a/%2e%2e/b", "file:///a%00", "file:///a?b", "file:///a#b", "file:///%ff", "file:///a\\b"),
        "file://127.0.0.1/a",
    ],
)
def test_what_two_parsers_might_read_differently_is_refused_S2(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_url(text)


@given(st.text(max_size=40), st.sampled_from(["https://", "http://", "https://example.com", "file:///", ""]))
def test_whatever_is_read_is_plain_and_reads_the_same_again_S2(text: str, start: str) -> None:
    try:
        url = parse_url(start + text)
    except InvalidRequest:
        return
    if isinstance(url, WebUrl):
        assert parse_url(url.origin + url.target) == url
        assert (url.origin + url.target).isascii()
        assert (url.origin + url.target).isprintable()
        assert not set(" @\\%") & set(url.host)


@given(st.text(st.sampled_from("0123456789.xabcf"), min_size=1, max_size=20))
def test_a_host_that_the_machine_would_take_for_an_address_is_one_in_the_usual_form_S2(text: str) -> None:
    import socket

    try:
        host = parse_host(text)
    except InvalidRequest:
        return
    try:
        packed = socket.inet_aton(host)
    except OSError:
        return
    assert socket.inet_ntoa(packed) == host


HERE = WebUrl("https", "example.com", 443, "/a/b/c?d=1")


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("https://other.example/x", WebUrl("https", "other.example", 443, "/x")),
        ("http://other.example:81", WebUrl("http", "other.example", 81, "/")),
        ("//other.example/x", WebUrl("https", "other.example", 443, "/x")),
        ("/x?y#z", WebUrl("https", "example.com", 443, "/x?y")),
        ("?y", WebUrl("https", "example.com", 443, "/a/b/c?y")),
        ("x", WebUrl("https", "example.com", 443, "/a/b/x")),
        ("./x/", WebUrl("https", "example.com", 443, "/a/b/x/")),
        ("../x", WebUrl("https", "example.com", 443, "/a/x")),
        ("../../../../x", WebUrl("https", "example.com", 443, "/x")),
        ("..", WebUrl("https", "example.com", 443, "/a/")),
        ("x?a=../b", WebUrl("https", "example.com", 443, "/a/b/x?a=../b")),
    ],
)
def test_a_redirect_leads_where_the_standard_says(location: str, expected: WebUrl) -> None:
    assert HERE.join(location) == expected


@pytest.mark.parametrize(
    "location",
    [
        *("file:///etc/passwd", "data:,x", "gopher://x/", "https://a@b/", "/a b", "\\\\b\\c", "//b\\c/", "https:x"),
        *("x:y", "1:x/../", "\x14ttp:127.0.0.1/../", "a b/../c", "/ü"),
    ],
)
def test_a_redirect_to_anything_but_a_plain_url_is_refused_S3(location: str) -> None:
    with pytest.raises(InvalidRequest):
        HERE.join(location)
