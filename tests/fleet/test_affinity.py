"""What the turns of a conversation have in common, and what tells conversations apart."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from semel.core import Digest, Item, Tenant
from semel.fleet.affinity import ConversationPrefix

SYSTEM = {"role": "system", "content": "Answer briefly."}
NOBODY = Tenant()
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def user(*parts: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts],
    }


def items(*numbers: int) -> tuple[Item, ...]:
    return tuple(Item("image", Digest(number.to_bytes(32, "big"))) for number in numbers)


def key(messages: list[dict[str, Any]], shown: tuple[Item, ...] = (), tenant: Tenant = NOBODY) -> bytes:
    return ConversationPrefix.of_chat(messages).key(shown, tenant)


def test_later_turns_have_the_key_of_the_first_also_if_they_bring_more_items() -> None:
    first = [SYSTEM, user("What is this?", IMAGE)]
    later = [*first, {"role": "assistant", "content": "A cat."}, user("And this?", IMAGE)]
    assert key(first, items(1)) == key(later, items(1, 2))
    text = [SYSTEM, user("Hello")]
    assert key(text) == key([*text, {"role": "assistant", "content": "Yes?"}, user("Look", IMAGE)], items(3))


def test_words_items_tenant_and_where_a_part_ends_tell_conversations_apart() -> None:
    keys = [
        key([user("a")]),
        key([user("b")]),
        key([SYSTEM, user("a")]),
        key([user("a")], tenant=Tenant("", "")),
        key([user("a")], tenant=Tenant("", "s")),
        key([user("a")], tenant=Tenant("s")),
        key([user("a")], tenant=Tenant("s", "")),
        key([user("a", IMAGE)], items(1)),
        key([user("a", IMAGE)], items(2)),
        key([user("a", "b")]),
        key([user("ab")]),
    ]
    assert len(set(keys)) == len(keys)


def test_words_count_up_to_a_megabyte_and_items_behind_it_count() -> None:
    long = "x" * 2**20
    assert key([user(long + "a", "b", IMAGE)], items(1)) == key([user(long + "c", "d", IMAGE)], items(1))
    assert key([user(long, IMAGE)], items(1)) != key([user(long, IMAGE)], items(2))
    assert key([user(long[9:] + "a")]) != key([user(long[9:] + "b")])


def test_a_role_that_is_no_text_is_left_to_be_refused() -> None:
    assert key([{"role": {"a": [1] * 9}, "content": "a"}]) == key([{"content": "a"}])


def test_a_text_is_the_same_as_a_string_and_as_a_part() -> None:
    assert key([{"role": "user", "content": "a"}]) == key([user("a")])


def test_prompts_with_one_beginning_share_a_key_as_texts_and_as_tokens() -> None:
    text, tokens = "x" * 1_024, list(range(256))
    assert (
        ConversationPrefix.of_prompt(text + "a")
        == ConversationPrefix.of_prompt(text + "b")
        != ConversationPrefix.of_prompt("y" + text)
    )
    assert (
        ConversationPrefix.of_prompt([*tokens, 1])
        == ConversationPrefix.of_prompt([*tokens, 2])
        != ConversationPrefix.of_prompt([1, *tokens])
    )


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.lists(st.fixed_dictionaries({}, optional={"role": json, "content": json})))
def test_messages_that_make_no_sense_are_left_to_others_to_refuse(messages: list[dict[str, Any]]) -> None:
    assert len(key(messages)) == 16
