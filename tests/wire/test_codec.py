"""Frames: what goes through, what is refused, and what is never copied or allocated."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import FeatureInfo, Item, Layout, Mask, Placeholder, Prompt, Submission, Timeline
from semel.errors import PromptTooLong, ProtocolError
from semel.ledger import Announcement
from semel.wire.codec import FROM_FRONTEND, FROM_WORKER, MAX_FRAMES, Frames, decode, encode, pack
from semel.wire.limits import Limits
from semel.wire.messages import (
    Abort,
    Chunk,
    FrontendMessage,
    HaveItem,
    Payload,
    Refusal,
    Runs,
    Status,
    Submit,
    TensorHead,
)
from semel.wire.translation import to_announcement, to_payload, to_prompt, to_status, to_submit
from tests.ledger.examples import have
from tests.wire.examples import LAYOUT, digest_of, feature_of_rows, submit

LIMITS = Limits()


def read(frames: Frames) -> FrontendMessage:
    return decode(frames, FROM_FRONTEND, LIMITS).message


def payload(*heads: TensorHead) -> Payload:
    return Payload(1, digest_of(1), "image", heads, b"")


def test_tensor_bytes_are_never_copied_on_encoding() -> None:
    feature = feature_of_rows(1000)
    buffers = [tensor.data for tensor in feature.tensors.values()]
    frames = encode(1, 2, pack(to_payload(1, digest_of(1), feature), LIMITS), buffers)
    assert all(sent is buffer for sent, buffer in zip(frames[1:], buffers, strict=True))


def test_tensor_bytes_are_never_copied_on_decoding() -> None:
    feature = feature_of_rows(1000)
    buffers = [tensor.data for tensor in feature.tensors.values()]
    found = decode(encode(1, 2, pack(to_payload(1, digest_of(1), feature), LIMITS), buffers), FROM_FRONTEND, LIMITS)
    assert [buffer.obj for buffer in found.buffers] == [buffer.obj for buffer in buffers]


def test_an_encoder_prompt_comes_out_as_it_went_in() -> None:
    before = Prompt([5, 6], Timeline.encoder([Placeholder(0, 3)]), (Item("audio", digest_of(1)),), (0, 0, 0))
    after = to_prompt(to_submit(Submission("r", before, {})), lambda _: Layout((0, 0, 0)), max_tokens=2)
    assert after == before


def test_a_prompt_that_grows_past_the_model_is_not_put_together_S16() -> None:
    with pytest.raises(PromptTooLong, match="the prompt has 11 tokens; the model takes 10"):
        to_prompt(submit(), lambda _: LAYOUT, max_tokens=10)


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=4), st.integers(0, 3)), max_size=6))
def test_any_prompt_comes_out_as_it_went_in(parts: list[tuple[list[int], int]]) -> None:
    tokens: list[int] = []
    places = []
    for text, length in parts:
        tokens += text
        places.append(Placeholder(len(tokens), length))
        tokens += [9] * length
    items = tuple(Item("image", digest_of(place.length)) for place in places)
    before = Prompt(tokens, Timeline.decoder(places), items)
    layouts = {digest_of(length): Layout((9,) * length) for length in range(4)}
    assert to_prompt(to_submit(Submission("r", before, {})), layouts.__getitem__, max_tokens=100) == before


@given(st.lists(st.tuples(st.integers(-2, 5), st.booleans()), max_size=30), st.booleans())
def test_what_is_held_comes_out_as_it_went_in(positions: list[tuple[int, bool]], masked: bool) -> None:
    layout = Layout(tuple(token for token, _ in positions), Mask(bit for _, bit in positions) if masked else None)
    holdings = {digest_of(number): FeatureInfo("image", number, layout) for number in range(3)}
    announcement = Announcement(3, 7, (digest_of(9),), holdings, more=True)
    message = decode(encode(1, 2, pack(to_status(announcement, 1, 2), LIMITS)), FROM_WORKER, LIMITS).message
    assert isinstance(message, Status)
    assert (message.running, message.waiting) == (1, 2)
    assert len(message.layouts) == 1
    assert to_announcement(message) == announcement


def test_equal_layouts_and_infos_of_any_workers_are_one_object_D2() -> None:
    """A frontend keeps them for every item of every worker. Control: what is made of a message by hand is not."""

    def announced(number: int) -> FeatureInfo:
        info = FeatureInfo("image", 700_000, Layout((1000,) * 50, Mask([True] * 50)))
        frames = encode(1, 2, pack(to_status(have(number, {digest_of(number): info}), 0, 0), LIMITS))
        message = decode(frames, FROM_WORKER, LIMITS).message
        assert isinstance(message, Status)
        assert Layout.of_runs(message.layouts[0].token_ids, message.layouts[0].mask, max_tokens=50) is not info.layout
        return to_announcement(message).holdings[digest_of(number)]

    one, other = announced(1), announced(2)
    assert one is other
    told = to_status(have(3, {digest_of(3): FeatureInfo("image", 9, one.layout)}), 0, 0)
    larger = to_announcement(told).holdings[digest_of(3)]
    assert larger.layout is one.layout


@pytest.mark.parametrize(
    "runs",
    [
        Runs(b"123"),
        Runs(bytes(4)),
        Runs(b"\x01\0\0\0\xff\xff\xff\x7f"),
        Runs(b"\x01\0\0\0\xff\xff\xff\xff"),
        Runs(b"\x01\0\0\0\x02\0\0\0", b"\x01\0\0\0"),
        Runs(b"", b"\xff\xff\xff\x7f"),
    ],
)
def test_an_announcement_that_does_not_hold_together_is_refused_S10(runs: Runs) -> None:
    with pytest.raises(ProtocolError, match="status 0 cannot be read"):
        to_announcement(Status(None, 0, 0, 0, (), (HaveItem(digest_of(1), "image", 1, 0),), (runs,)))
    with pytest.raises(ProtocolError, match="status 0 cannot be read"):
        to_announcement(Status(None, 0, 0, 0, (), (HaveItem(digest_of(1), "image", 1, 1),), (Runs(b""),)))


def test_a_repeat_costs_less_than_200_bytes_on_the_wire_however_large_the_item_D1() -> None:
    text = Prompt([1] * 20, Timeline.decoder([]), ())
    tokens = [1] * 10 + [8] * 2_691 + [1] * 10
    shown = Prompt(tokens, Timeline.decoder([Placeholder(10, 2_691)]), (Item("image", digest_of(1)),))
    sizes = [len(pack(to_submit(Submission("r1", one, {})), LIMITS)) for one in (text, shown)]
    assert sizes[1] - sizes[0] <= 50


@pytest.mark.slow
def test_a_prompt_with_the_most_items_fits_a_message_and_one_more_is_refused_S10() -> None:
    def of(count: int) -> Prompt:
        return Prompt(
            [1] * 31 * count,
            Timeline.decoder(Placeholder(31 * index, 31) for index in range(count)),
            tuple(Item("image", digest_of(index)) for index in range(count)),
        )

    body = pack(to_submit(Submission("r", of(32_768), {})), LIMITS)
    assert isinstance(read(encode(1, 2, body)), Submit)
    with pytest.raises(ProtocolError, match="length <= 32768"):
        read(encode(1, 2, pack(to_submit(Submission("r", of(32_769), {})), LIMITS)))


@pytest.mark.parametrize(
    ("frames", "wrong"),
    [
        ([], "1 to 65 frames"),
        ([b""] * (MAX_FRAMES + 1), "1 to 65 frames"),
        ([b""], "this one has 0"),
        ([bytes(16)], "this one has 16"),
        ([bytes(LIMITS.max_control_bytes + 1)], "this one has 16,777,217"),
        ([bytes(16) + b"\xdd\xff\xff\xff\xff"], "cannot be read"),
        ([bytes(16) + b"\x91" * 100_000], "cannot be read"),
        ([bytes(16) + b"\x92\xcc\xc8\xa1r"], "cannot be read"),  # a tag that does not exist
        (encode(1, 2, pack(Refusal("key", "no"), LIMITS)), "cannot be read"),  # of the other direction
        (encode(1, 2, pack(Abort("r"), LIMITS) + b"x"), "trailing"),
        (encode(1, 2, pack(Abort("r"), LIMITS), [memoryview(b"x")]), r"announces buffers of \[\] bytes, \[1\] came"),
        (encode(1, 2, pack(Chunk(1, 0, 0, 5), LIMITS)), r"of \[5\] bytes, \[\] came"),
        (encode(1, 2, pack(Chunk(1, 0, 0, 5), LIMITS), [memoryview(b"four")]), r"of \[5\] bytes, \[4\] came"),
        (encode(1, 2, pack(Chunk(1, 0, 0, 1 << 40), LIMITS)), "a chunk has 1 to 262,144"),
        (encode(1, 2, pack(Chunk(1, 0, 0, -1), LIMITS)), "cannot be read"),
        (encode(1, 2, pack(payload(TensorHead("a", "object", (1,))), LIMITS)), "unknown dtype 'object'"),
        (encode(1, 2, pack(payload(TensorHead("a", "uint8", (2**31,))), LIMITS)), "cannot be read"),
        (encode(1, 2, pack(payload(TensorHead("a", "uint8", (2**31 - 1,) * 16)), LIMITS)), "at most 268,435,456"),
        (encode(1, 2, pack(payload(TensorHead("a", "uint8", (-1,))), LIMITS)), "cannot be read"),
        (encode(1, 2, pack(payload(*[TensorHead("a", "int8", (1,))] * 2), LIMITS)), "names a tensor twice"),
        (encode(1, 2, pack(payload(*[TensorHead("a", "int8", ())] * 65), LIMITS)), "length <= 64"),
    ],
)
def test_frames_that_break_a_rule_are_refused_with_what_is_wrong_S10(frames: Frames, wrong: str) -> None:
    with pytest.raises(ProtocolError, match=wrong):
        read(frames)


def test_a_message_that_claims_much_makes_nobody_allocate_it_S10() -> None:
    claims: list[Frames] = [
        encode(1, 2, pack(payload(TensorHead("a", "float64", (2**31 - 1,) * 16)), LIMITS)),
        encode(1, 2, pack(Chunk(1, 0, 0, 1 << 62), LIMITS)),
        [bytes(16) + b"\xdd\xff\xff\xff\xff" + bytes(64)],
        [bytes(16) + b"\x96\x14\xa1r\xc6\xff\xff\xff\xff"],
    ]
    tracemalloc.start()
    for frames in claims:
        with pytest.raises(ProtocolError):
            read(frames)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_a_message_that_is_too_large_is_not_even_sent() -> None:
    with pytest.raises(ProtocolError, match="a message may have 16,777,216"):
        pack(Abort("r" * (17 << 20)), LIMITS)


@pytest.mark.parametrize(
    "broken",
    [
        {"token_ids": b"123"},
        {"token_ids": b""},
        {"places": submit().places[::-1]},
    ],
)
def test_a_prompt_that_does_not_hold_together_is_refused(broken: dict[str, object]) -> None:
    import msgspec

    with pytest.raises(ProtocolError, match="request r1 has a broken prompt"):
        to_prompt(msgspec.structs.replace(submit(), **broken), lambda _: LAYOUT, max_tokens=100)
