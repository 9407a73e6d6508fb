from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.core import Digest, Item, Layout
from semel.errors import InvalidRequest
from semel.render import ChatRenderer, Conversation
from semel.render.tokens.expand import expand
from semel.render.tokens.placeholder_escape import LETTERS, are_spelled, break_spellings, strings_in, unused_letters

FRAGMENTS = [
    "<|image_pad|>",
    "<|AUDIO|>",
    "<|video_pad|>",
    "<|image",
    "_pad|>",
    "<",
    "|>",
    "hello",
    " ",
    "\n",
    LETTERS[0],
]
EXAMPLES = settings(deadline=None)
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=8).map("".join)


def user(*content: Any) -> Conversation:
    return Conversation.parse([{"role": "user", "content": list(content)}])


@EXAMPLES
@given(text=TEXTS)
def test_s14_spelled_placeholders_stay_text_and_decode_to_the_same_text(
    parts_renderer: ChatRenderer, text: str
) -> None:
    token_ids = parts_renderer.tokenize(user(text))
    assert not parts_renderer.placeholder_ids().keys() & set(token_ids)
    assert parts_renderer.tokenizer.decode(token_ids) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@EXAMPLES
@given(before=TEXTS, behind=TEXTS)
def test_s14_a_real_item_beside_spelled_ones_is_the_only_placeholder(
    parts_renderer: ChatRenderer, pixel: dict[str, Any], before: str, behind: str
) -> None:
    token_ids = parts_renderer.tokenize(user(before, pixel, behind))
    ids = parts_renderer.placeholder_ids()
    assert [ids[token] for token in token_ids if token in ids] == ["image"]
    assert f"\n{before}<|image_pad|>{behind}<|im_end|>" in parts_renderer.tokenizer.decode(token_ids)


@EXAMPLES
@given(texts=st.lists(TEXTS, min_size=2, max_size=4))
def test_s14_what_two_texts_spell_together_is_refused_and_all_else_is_text(
    parts_renderer: ChatRenderer, texts: list[str]
) -> None:
    token_ids = parts_renderer.tokenize(user(*texts))
    try:
        prompt = expand(token_ids, placeholder_ids=parts_renderer.placeholder_ids(), items=(), layouts=())
    except InvalidRequest as error:
        assert "neighbouring texts spell a placeholder token together" in str(error)
        return
    assert "".join(texts) in parts_renderer.tokenizer.decode(prompt.token_ids)


def test_s14_two_parts_that_spell_a_placeholder_together_stay_text(
    parts_renderer: ChatRenderer, pixel: dict[str, Any]
) -> None:
    token_ids = parts_renderer.tokenize(user("<|image", "_pad|>", pixel))
    held = Item("image", Digest(bytes(32)))
    expand(token_ids, placeholder_ids=parts_renderer.placeholder_ids(), items=[held], layouts=[Layout((1,))])


def test_s14_two_parts_do_not_take_the_place_of_an_item_that_is_left_out(parts_renderer: ChatRenderer) -> None:
    """Several system messages become one of words alone, and the words must not stand for what was lost."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}}
    messages = [{"role": "user", "content": ["<|image_", "pad|>"]}, {"role": "developer", "content": [image]}]
    token_ids = parts_renderer.tokenize(Conversation.parse(messages))
    assert not set(token_ids) & parts_renderer.placeholder_ids().keys()


@EXAMPLES
@given(text=TEXTS)
def test_s14_names_arguments_tools_roles_and_variables_are_text_too(string_renderer: ChatRenderer, text: str) -> None:
    conversation = Conversation.parse([{"role": f"user{text}", "content": "hi", "name": text}])
    tools = [{"type": "function", "function": {"name": text, "parameters": {text: [text, 1, None]}}}]
    token_ids = string_renderer.tokenize(conversation, tools=tools, template_kwargs={"hint": text})
    assert not string_renderer.placeholder_ids().keys() & set(token_ids)
    shown = string_renderer.tokenizer.decode(token_ids)
    assert shown.startswith(f"{tools}<|im_start|>user{text}\nhi<|im_end|>\n{text}")


@EXAMPLES
@given(text=TEXTS)
def test_s14_arguments_of_tool_calls_are_text_too(parts_renderer: ChatRenderer, text: str) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {text: text}}}
    conversation = Conversation.parse([{"role": "assistant", "content": None, "tool_calls": [call]}])
    token_ids = parts_renderer.tokenize(conversation)
    assert not parts_renderer.placeholder_ids().keys() & set(token_ids)
    assert not any(letter in parts_renderer.tokenizer.decode(token_ids) for letter in LETTERS[1:])


def test_s14_text_that_spells_no_placeholder_is_tokenised_in_one_go(parts_renderer: ChatRenderer) -> None:
    rendered = "<|im_start|>user\nhello <|im_end|> there<|im_end|>\n<|im_start|>assistant\n"
    assert parts_renderer.tokenize(user("hello <|im_end|> there")) == parts_renderer.tokenizer.encode(rendered)


def test_s14_spellings_that_overlap_are_all_broken() -> None:
    assert break_spellings(["aa", "ab"], "|")("aaab") == "a|a|a|b"


def test_s14_letters_of_the_request_are_never_the_guard(parts_renderer: ChatRenderer) -> None:
    assert next(unused_letters(LETTERS[:5])) == LETTERS[5]
    text = f"<|image_pad|>{LETTERS[:-1]}"
    assert text in parts_renderer.tokenizer.decode(parts_renderer.tokenize(user(text)))


def test_s14_a_request_that_uses_every_letter_and_spells_a_placeholder_is_refused(parts_renderer: ChatRenderer) -> None:
    assert parts_renderer.tokenize(user(LETTERS))
    with pytest.raises(InvalidRequest, match="all letters of Linear A"):
        parts_renderer.tokenize(user(f"{LETTERS}<|image_pad|>"))


def test_s15_deep_nesting_is_refused_before_anything_recurses(parts_renderer: ChatRenderer) -> None:
    deep: Any = "end"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="over 128 deep"):
        parts_renderer.tokenize(user("hi"), template_kwargs={"deep": deep})
    while isinstance(deep, list):  # else the interpreter itself would recurse while it frees the lists
        deep = deep.pop()


def test_strings_are_found_in_keys_and_values_at_any_depth() -> None:
    assert sorted(strings_in({"a": ["b", {"c": ("d", 1, None)}], "e": 2})) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("texts", [["<|image_", "pad|>"], ["<", "|image_pad|>"], ["a <|im", "age_", "pad|> b"]])
def test_what_texts_spell_together_is_broken_wherever_a_template_puts_them_S14(texts: list[str]) -> None:
    assert are_spelled(["<|image_pad|>"], texts)
    broken = break_spellings(["<|image_pad|>"], LETTERS[0])
    assert "<|image_pad|>" in "".join(texts)  # the naive way: each text is harmless by itself
    assert "<|image_pad|>" not in "".join(map(broken, texts))


@pytest.mark.parametrize("texts", [["a <", "b"], ["> quoted", "x"], ["a", "<|im_end|>"]])
def test_texts_that_cannot_spell_it_together_are_left_alone(texts: list[str]) -> None:
    assert not are_spelled(["<|image_pad|>"], texts)
