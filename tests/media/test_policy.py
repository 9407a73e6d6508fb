"""What may be fetched, decided from values alone (S1)."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import pytest

from semel.errors import ConfigError, MediaNotAllowed
from semel.media.fetch.policy import HostRule, MediaPolicy
from semel.media.fetch.url import WebUrl, parse_url


def refusal(policy: MediaPolicy, url: str, previous: str | None = None) -> str | None:
    before = None if previous is None else parse_url(previous)
    assert before is None or isinstance(before, WebUrl)
    try:
        policy.check(parse_url(url), previous=before)
    except MediaNotAllowed as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("url", "flag"),
    [
        ("https://example.com/", "--allowed-media-domains"),
        ("http://example.com/", "--allow-media-http"),
        ("https://127.0.0.1/", "--allowed-media-domains"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
    ],
)
def test_nothing_is_allowed_unless_the_operator_says_so_and_the_flag_is_named_S1(url: str, flag: str) -> None:
    told = refusal(MediaPolicy(), url)
    assert told is not None
    assert flag in told


@pytest.mark.parametrize(
    ("rule", "url", "allowed"),
    [
        ("example.com", "https://example.com/", True),
        ("EXAMPLE.com.", "https://example.COM./", True),
        ("bücher.example", "https://xn--bcher-kva.example/", True),
        ("example.com", "https://a.example.com/", False),
        ("example.com", "https://example.com.evil.example/", False),
        ("example.com", "https://evilexample.com/", False),
        ("example.com", "https://example.com:8443/", False),
        ("example.com", "http://example.com/", True),
        ("example.com", "http://example.com:443/", False),
        ("example.com", "https://example.com:80/", False),
        ("example.com:8443", "https://example.com:8443/", True),
        ("example.com:8443", "http://example.com:8443/", True),
        ("example.com:8443", "https://example.com/", False),
        (".example.com", "https://a.example.com/", True),
        (".example.com", "https://a.b.example.com/", True),
        (".example.com", "https://example.com/", False),
        (".example.com", "https://evilexample.com/", False),
        (".example.com:8443", "https://a.example.com:8443/", True),
        ("*", "https://anything.example/", True),
        ("*", "https://anything.example:8443/", False),
        ("*:8443", "https://anything.example:8443/", True),
        ("*", "https://93.184.216.34/", True),
        ("93.184.216.34", "https://93.184.216.34/", True),
        ("[2606:4700::0:1]:9000", "https://[2606:4700::1]:9000/", True),
    ],
)
def test_a_host_is_allowed_by_its_name_or_its_domain_and_at_its_port_S1(rule: str, url: str, allowed: bool) -> None:
    assert (refusal(MediaPolicy.of(domains=[rule], allow_http=True), url) is None) == allowed


@pytest.mark.parametrize(
    ("url", "flags"),
    [
        ("https://example.com/", {"--allowed-media-domains"}),
        ("http://example.com/", {"--allowed-media-domains", "--allow-media-http"}),
        ("http://10.1.2.3:9000/", {"--allowed-media-domains", "--allow-media-http", "--allowed-media-networks"}),
        ("https://[::1]/", {"--allowed-media-domains", "--allowed-media-networks"}),
        ("https://8.8.8.8/", {"--allowed-media-domains"}),
    ],
)
def test_a_refusal_names_every_flag_that_the_url_would_need_S1(url: str, flags: set[str]) -> None:
    """Nor does it say which networks are allowed."""
    for policy in (MediaPolicy(), MediaPolicy.of(networks=["10.0.0.0/8"])):
        told = refusal(policy, url) or ""
        assert {word for word in told.split() if word.startswith("--")} == flags


def test_of_the_target_of_a_redirect_nothing_is_said_S3_S7() -> None:
    policy = MediaPolicy.of(domains=["a.example"], allow_http=True)
    targets = ("http://vault.corp.internal/", "http://10.1.2.3/", "http://8.8.8.8/")
    (told,) = {refusal(policy, target, "http://a.example/") for target in targets}
    assert "internal" not in (told or "internal")


@pytest.mark.parametrize("host", ["127.0.0.1", "169.254.169.254", "[::1]", "[::ffff:10.0.0.1]", "10.1.2.3", "0.0.0.0"])
def test_an_address_that_is_not_public_is_refused_even_if_it_is_allowed_by_name_S1(host: str) -> None:
    for domains in (["*"], [host]):
        assert "--allowed-media-networks" in (refusal(MediaPolicy.of(domains=domains), f"https://{host}/") or "")


def test_a_network_is_open_to_hosts_that_are_named_and_closed_to_those_that_a_star_lets_in_S1() -> None:
    policy = MediaPolicy.of(domains=["*", "store.example", ".in.example", "odd.example:9000"], networks=["10.1.0.0/16"])
    inside, outside, public = map(ip_address, ("10.1.2.3", "10.2.0.1", "8.8.8.8"))
    for host, port in (("store.example", 443), ("a.in.example", 443), ("odd.example", 9000)):
        assert policy.reach(host, port).covers(inside)
        assert policy.reach(host, port).covers(public)
        assert not policy.reach(host, port).covers(outside)
    for host, port in (("evil.example", 443), ("in.example", 443), ("odd.example", 443)):
        assert not policy.reach(host, port).covers(inside)
        assert policy.reach(host, port).covers(public)
    assert policy.reach("store.example", 443).covers(ip_address("::ffff:10.1.2.3"))


def test_the_addresses_of_a_cloud_s_secrets_need_a_network_of_their_own_S1() -> None:
    metadata = ip_address("169.254.169.254")
    wide = MediaPolicy.of(domains=["a.example"], networks=["169.254.0.0/16", "0.0.0.0/0", "::/0"])
    assert not wide.reach("a.example", 443).covers(metadata)
    assert not wide.reach("a.example", 443).covers(ip_address("::ffff:169.254.169.254"))
    assert not wide.reach("a.example", 443).covers(ip_address("64:ff9b::169.254.169.254"))
    assert wide.reach("a.example", 443).covers(ip_address("169.254.1.1"))
    narrow = MediaPolicy.of(domains=["a.example"], networks=["169.254.169.254/32"])
    assert narrow.reach("a.example", 443).covers(metadata)


def test_a_redirect_is_judged_like_a_request_and_may_not_leave_https_S3() -> None:
    policy = MediaPolicy.of(domains=["a.example", "b.example"], allow_http=True)
    assert refusal(policy, "https://b.example/", "https://a.example/") is None
    assert refusal(policy, "https://b.example/", "http://a.example/") is None
    assert "https to http" in (refusal(policy, "http://b.example/", "https://a.example/") or "")


@pytest.mark.parametrize(
    "rule", ["", ".", "*.example.com", "a b", "https://example.com", "a:0", "a:65536", "127.1", "[::1"]
)
def test_a_rule_that_makes_no_sense_is_refused_at_the_start(rule: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-media-domains"):
        HostRule.parse(rule)


@pytest.mark.parametrize("network", ["", "10.0.0.1/8", "10.0.0.0/33", "private", "::ffff:10.0.0.0/104"])
def test_a_network_that_makes_no_sense_is_refused_at_the_start(network: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-media-networks"):
        MediaPolicy.of(networks=[network])


def test_a_folder_has_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("none", "file"):
        with pytest.raises(ConfigError, match="--allowed-local-media-path"):
            MediaPolicy.of(local_path=tmp_path / name)


def test_a_file_has_to_be_named_below_the_folder_by_either_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    policy = MediaPolicy.of(local_path=tmp_path / "link")
    for name in ("real", "link"):
        assert refusal(policy, f"file://{tmp_path}/{name}/a.png") is None
    for name in ("realm/a.png", "a.png"):
        assert refusal(policy, f"file://{tmp_path}/{name}") is not None
