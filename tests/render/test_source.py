from __future__ import annotations

import base64
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.core import Media, Modality
from semel.errors import InvalidRequest, MediaError
from semel.render import source_from
from semel.render.media.source import LongString


@settings(deadline=None)
@given(data=st.binary(min_size=1), modality=st.sampled_from(("audio", "image", "video")))
def test_a_data_url_gives_its_bytes_and_type(data: bytes, modality: Modality) -> None:
    url = f"data:{modality}/x-any;base64,{base64.b64encode(data).decode()}"
    assert source_from(url, modality, where="here") == Media(modality, data, f"{modality}/x-any")


@pytest.mark.parametrize("head", ["DATA:image/png;base64", "data:IMAGE/png;charset=x;base64", "data:;base64"])
def test_case_parameters_and_a_missing_type_do_not_matter(head: str) -> None:
    media = source_from(f"{head},YWJj", "image", where="here")
    assert isinstance(media, Media)
    assert media.data == b"abc"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://user@example.com/cat.png", "the URL has a user's name"),
        ("https://127.1/cat.png", "'127.1' is not an IPv4 address"),
        ("ftp://example.com/" + "a" * 999, "a…' is not a URL of a known scheme"),
        ("file://example.com/etc/passwd", "file:///path"),
        ("YWJj", "not a URL of a known scheme"),
        ("data", "not a URL of a known scheme"),
        ("", "not a URL of a known scheme"),
        ("data:image/png;base64", "is not of the form"),
        ("data:image/png,YWJj", "is not of the form"),
        ("data:,YWJj", "is not of the form"),
        ("data:audio/wav;base64,YWJj", "type 'audio/wav' cannot be used as image"),
        ("data:imagery/png;base64,YWJj", "type 'imagery/png' cannot be used as image"),
    ],
)
def test_other_urls_are_refused_with_the_place_and_the_reason(url: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        source_from(url, "image", where="messages[0].content[1]")
    assert str(caught.value).startswith("messages[0].content[1]: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["YW Jj", "YWJj\n", "YWJ", "é", "YWJj,YWJj"])
def test_base64_is_checked_strictly(text: str) -> None:
    with pytest.raises(MediaError, match=r"^here: the image is not valid base64"):
        source_from(f"data:image/png;base64,{text}", "image", where="here")


def test_s8_empty_media_is_refused() -> None:
    with pytest.raises(MediaError, match="the image is empty"):
        source_from("data:image/png;base64,", "image", where="here")


def test_a_list_of_frames_is_copied_once_S21() -> None:
    """Its request has paid for three quarters of it, which is what the base64 of other media becomes."""
    text = LongString(memoryview(b"data:video/jpeg;base64," + b"YWJj" * (2 << 20)))
    tracemalloc.start()
    media = source_from(text, "video", where="here")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(media, Media)
    assert media.data == text.data
    assert most < 1.3 * len(text)
