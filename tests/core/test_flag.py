"""Flags: declared on a section's fields, read from a command line, written for people."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from semel.core.flag import GIB, MIB, REQUIRED, Flag, Group, arguments_of, fill, flag, flags_of, same_flag, section


@dataclass(frozen=True, slots=True)
class Inner:
    GROUP: ClassVar[Group] = "Limits"

    max_bytes: int = flag(256 * MIB, "max-body-bytes", help="A size.", unit="bytes", min=1)
    cache_bytes: int = flag(GIB // 4, "cache-gb", help="A cache.", group="Caches", unit="GiB", min=0)
    hidden: int = 3


@dataclass(frozen=True, slots=True)
class Outer:
    model: str = flag(REQUIRED, help="A model.", group="Server", is_positional=True)
    port: int = flag(8000, help="A port.", group="Server", min=0, max=65_535)
    seconds: float = flag(120.0, help="A time.", group="Limits", unit="seconds", min=0.5)
    kind: Literal["shared", "lru"] = flag("shared", help="A kind.", group="Caches")
    names: tuple[str, ...] = flag((), help="Names.", group="Fleet")
    path: Path | None = flag(None, help="A path.", group="Keys")
    quiet: bool = flag(False, help="A switch.", group="Output")
    inner: Inner = section(Inner)


@dataclass(frozen=True, slots=True)
class Other:
    nbytes: int = same_flag(Inner, "cache_bytes")
    max_bytes: int = same_flag(Inner, "max_bytes", default=7)
    port: int = same_flag(Outer, "port")


def found(name: str, kind: type = Outer) -> Flag:
    (one,) = [one for one in flags_of(kind) if one.name == name]
    return one


def test_a_field_becomes_a_flag_and_one_without_a_declaration_does_not() -> None:
    names = ["model", "port", "seconds", "kind", "names", "path", "quiet", "max-body-bytes", "cache-gb"]
    assert [one.name for one in flags_of(Outer)] == names
    assert found("max-body-bytes").path == ("inner", "max_bytes")


def test_a_flag_has_its_own_group_or_that_of_its_section() -> None:
    assert [found(name).group for name in ("max-body-bytes", "cache-gb", "port")] == ["Limits", "Caches", "Server"]
    assert found("max-body-bytes", Other).group == "Limits"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("port", "0", 0),
        ("port", "65535", 65_535),
        ("seconds", "0.5", 0.5),
        ("seconds", "inf", float("inf")),
        ("kind", "lru", "lru"),
        ("path", "/a", Path("/a")),
        ("max-body-bytes", "268435456", 268_435_456),
        ("max-body-bytes", "9007199254740993", 9_007_199_254_740_993),
        ("max-body-bytes", "256MiB", 256 * MIB),
        ("max-body-bytes", "256m", 256 * MIB),
        ("max-body-bytes", "1.5 GiB", 1_536 * MIB),
        ("max-body-bytes", "1B", 1),
        ("cache-gb", "0.25", 0.25),
    ],
)
def test_a_value_is_read(name: str, text: str, value: object) -> None:
    assert found(name).parse(text) == value


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("port", "65536", "--port 65536: must be a whole number from 0 to 65535"),
        ("port", "-1", "from 0 to 65535"),
        ("port", "8000.0", "a whole number"),
        ("seconds", "0.4", "--seconds 0.4: must be a number of seconds, at least 0.5"),
        ("seconds", "nan", "a number of seconds"),
        ("kind", "LRU", "--kind LRU: must be one of shared, lru"),
        ("max-body-bytes", "0", "--max-body-bytes 0: must be a number of bytes or a size such as 256MiB, at least 1"),
        ("max-body-bytes", "256MB", "such as 256MiB"),
        ("max-body-bytes", "0.0001K", "at least 1"),
        ("cache-gb", "inf", "--cache-gb inf: must be a number, at least 0"),
        ("cache-gb", "-1", "at least 0"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_flag_value_and_bound(name: str, text: str, complaint: str) -> None:
    with pytest.raises(ValueError) as caught:
        found(name).parse(text)
    assert complaint in str(caught.value)


def test_a_section_is_filled_through_all_levels_and_in_its_own_units() -> None:
    filled = fill(Outer, {"model": "m", "names": ("a", "b"), "max_body_bytes": 5, "cache_gb": 0.5, "unknown": 1})
    assert filled == Outer(model="m", names=("a", "b"), inner=Inner(max_bytes=5, cache_bytes=GIB // 2))
    assert fill(Outer, {"model": "m"}) == Outer(model="m")
    with pytest.raises(TypeError, match="model"):
        fill(Outer, {})


def test_defaults_survive_the_command_line() -> None:
    values: dict[str, Any] = {one.key: one.default for one in flags_of(Outer)} | {"model": "m"}
    assert fill(Outer, values) == Outer(model="m")


def test_the_same_flag_in_another_section_fills_another_field() -> None:
    assert fill(Other, {"cache_gb": 2.0, "port": 1}) == Other(nbytes=2 * GIB, port=1, max_bytes=7)
    assert found("cache-gb", Other).help == found("cache-gb").help
    assert Other().nbytes == Inner().cache_bytes


def test_values_are_written_as_they_stand_on_a_command_line() -> None:
    values = {"port": 1, "names": ("a", "b"), "quiet": True, "path": None, "cache_gb": 0.25}
    assert arguments_of(flags_of(Outer), values) == ["--port=1", "--names=a", "--names=b", "--quiet", "--cache-gb=0.25"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("max-body-bytes", "256 MiB"),
        ("cache-gb", "0.25 GiB"),
        ("seconds", "120 s"),
        ("port", "8000"),
        ("kind", "shared"),
        ("names", ""),
        ("model", ""),
    ],
)
def test_a_default_is_shown_as_a_person_reads_it(name: str, shown: str) -> None:
    assert found(name).readable_default == shown
