"""Frames: what goes through, what is refused, and what is never copied or allocated."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import ProtocolError
from semel.wire.codec import FROM_FRONTEND, FROM_WORKER, MAX_FRAMES, Frames, decode, encode, pack
from semel.wire.limits import Limits
from semel.wire.messages import Abort, Chunk, FrontendMessage, Payload, Refusal, Submit, TensorHead
from semel.wire.translation import feature_of, payload_of, prompt_of, submit_of
from tests.wire.examples import digest_of, feature_of_rows, prompt, same, submit

LIMITS = Limits()


def read(frames: Frames) -> FrontendMessage:
    return decode(frames, FROM_FRONTEND, LIMITS).message


def payload(*heads: TensorHead) -> Payload:
    return Payload(1, digest_of(1), "image", heads, b"")


def test_tensor_bytes_are_never_copied_on_encoding() -> None:
    feature = feature_of_rows(1000)
    buffers = [tensor.data for tensor in feature.tensors.values()]
    frames = encode(1, 2, pack(payload_of(1, digest_of(1), feature), LIMITS), buffers)
    assert all(sent is buffer for sent, buffer in zip(frames[1:], buffers, strict=True))


def test_tensor_bytes_are_never_copied_on_decoding() -> None:
    feature = feature_of_rows(1000)
    buffers = [tensor.data for tensor in feature.tensors.values()]
    found = decode(encode(1, 2, pack(payload_of(1, digest_of(1), feature), LIMITS), buffers), FROM_FRONTEND, LIMITS)
    assert [buffer.obj for buffer in found.buffers] == [buffer.obj for buffer in buffers]


def test_a_prompt_comes_out_as_it_went_in() -> None:
    message = read(encode(1, 2, pack(submit(), LIMITS)))
    assert isinstance(message, Submit)
    found = prompt_of(message)
    assert (list(found.token_ids), found.timeline, found.items) == (
        prompt().token_ids,
        prompt().timeline,
        prompt().items,
    )
    assert message.sampling == {"max_tokens": 4, "temperature": 0.0}
    assert found.timeline[0].mask is found.timeline[1].mask


def test_an_encoder_prompt_comes_out_as_it_went_in() -> None:
    from semel.core import Item, Placeholder, Prompt, Timeline

    before = Prompt([5, 6], Timeline.encoder([Placeholder(0, 3)]), (Item("audio", digest_of(1)),), [0, 0, 0])
    after = prompt_of(submit_of("r", before, sampling={}))
    assert after == before


def test_a_repeat_costs_less_than_200_bytes_on_the_wire() -> None:
    whole = len(pack(submit(), LIMITS))
    without = len(pack(submit_of("r1", prompt(), sampling={}), LIMITS))
    assert whole < 400
    assert without < 200


def test_a_prompt_with_the_most_items_fits_a_message_and_one_more_is_refused_S10() -> None:
    from semel.core import Item, Placeholder, Prompt, Timeline

    def of(count: int) -> Prompt:
        return Prompt(
            [1] * 31 * count,
            Timeline.decoder(Placeholder(31 * index, 31) for index in range(count)),
            tuple(Item("image", digest_of(index)) for index in range(count)),
        )

    body = pack(submit_of("r", of(32_768), sampling={}), LIMITS)
    assert isinstance(read(encode(1, 2, body)), Submit)
    with pytest.raises(ProtocolError, match="length <= 32768"):
        read(encode(1, 2, pack(submit_of("r", of(32_769), sampling={}), LIMITS)))


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
        {"masks": ()},
        {"masks": (b"\x01",)},
        {"encoder_token_ids": b""},
        {"places": submit().places[::-1]},
    ],
)
def test_a_prompt_that_does_not_hold_together_is_refused(broken: dict[str, object]) -> None:
    import msgspec

    with pytest.raises(ProtocolError, match="request r1 has a broken prompt"):
        prompt_of(msgspec.structs.replace(submit(), **broken))


def test_a_feature_comes_out_as_it_went_in() -> None:
    feature = feature_of_rows(3)
    buffers = [tensor.data for tensor in feature.tensors.values()]
    assert same(feature_of(payload_of(1, digest_of(1), feature), buffers), feature)


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_frames_are_refused_and_nothing_worse_S10(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(frames, FROM_FRONTEND, LIMITS)
    with pytest.raises(ProtocolError):
        decode(frames, FROM_WORKER, LIMITS)


VALID = pack(submit(), LIMITS)


@given(st.integers(0, len(VALID) - 1), st.binary(max_size=8), st.integers(0, 8))
def test_a_message_with_bytes_exchanged_is_read_or_refused_and_nothing_worse_S10(
    at: int, instead: bytes, skip: int
) -> None:
    try:
        message = read(encode(1, 2, VALID[:at] + instead + VALID[at + skip :]))
        if isinstance(message, Submit):
            prompt_of(message)
    except ProtocolError:
        pass


def test_limits_that_are_changed_are_kept() -> None:
    with pytest.raises(ProtocolError, match="a chunk has 1 to 4"):
        decode(
            encode(1, 2, pack(Chunk(1, 0, 0, 5), LIMITS), [memoryview(b"12345")]),
            FROM_FRONTEND,
            replace(LIMITS, chunk_bytes=4),
        )
