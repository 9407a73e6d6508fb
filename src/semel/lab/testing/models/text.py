"""The text side of the tiny families: language model, chat templates, and the vocabulary.

The language model has two layers of 128 channels over 1,024 tokens. A family adds its tower and its special tokens, and
the differences of its text model. Whisper has a decoder of another kind, and only the vocabulary from here.

The vocabulary is byte-level BPE, trained on the sentences below. Every byte is a token, so any text can be encoded.
Training depends on the sentences and the size only, never on the order of a hash map or the number of threads. Special
tokens come after the trained ones, in the order of their list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

__all__ = [
    "CHATML",
    "END_GAIN",
    "GAINS",
    "HIDDEN_SIZE",
    "NORM_EPSILON",
    "VOCABULARY_TOKENS",
    "Vocabulary",
    "byte_level",
    "chat_template",
    "qwen2",
    "text_config",
    "train",
]

VOCABULARY_TOKENS = 1024
HIDDEN_SIZE = 128

GAINS = MappingProxyType(
    {
        "*.embed_tokens.weight": 0.3,
        "*.q_proj.weight": 2.2,
        "*.k_proj.weight": 2.2,
        "*.v_proj.weight": 2.0,
        "*.o_proj.weight": 2.0,
        "*.gate_proj.weight": 2.0,
        "*.up_proj.weight": 2.0,
        "*.down_proj.weight": 2.0,
        "lm_head.weight": 3.0,
    }
)
END_GAIN = 0.9
# Not negligible next to the variance of a token embedding: the first norm dampens text, so that the larger items stand
# out.
NORM_EPSILON = 0.1


def text_config(max_positions: int, *, bos: int, eos: int, **own: Any) -> dict[str, Any]:
    """Return the `text_config` of a family; `own` has the values of that family only."""
    return {
        "vocab_size": VOCABULARY_TOKENS,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": max_positions,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "dtype": "float32",
        **own,
    }


CHATML: Mapping[str, str] = {
    "turn": "'<|im_start|>' + message.role + '\\n'",
    "end": "'<|im_end|>\\n'",
    "answer": "'<|im_start|>assistant\\n'",
}

_PART_TYPES = {
    "image": "('image', 'image_url')",
    "video": "('video', 'video_url')",
    "audio": "('audio', 'audio_url', 'input_audio')",
}

_TEMPLATE = """\
{%- macro render(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type == 'text' -%}
        {{- part.text -}}
@ITEMS@      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{{- @START@ -}}
{%- for message in messages -%}
  {{- @TURN@ + render(message.content) + @END@ -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- @ANSWER@ -}}
{%- endif -%}
"""

_ITEM = """\
      {%- elif part.type in @TYPES@ -%}
        {{- @TEXT@ -}}
"""


def chat_template(items: Mapping[str, str], *, start: str = "''", turn: str, end: str, answer: str) -> str:
    """Return a template that writes an item as `items` says for its modality.

    `start` begins the prompt, `turn` and `end` surround a message, and `answer` begins the model's own: each is a Jinja
    expression. Items are plain text.
    """
    branches = (
        _ITEM.replace("@TYPES@", _PART_TYPES[modality]).replace("@TEXT@", repr(text))
        for modality, text in items.items()
    )
    text = _TEMPLATE.replace("@ITEMS@", "".join(branches)).replace("@START@", start).replace("@TURN@", turn)
    return text.replace("@END@", end).replace("@ANSWER@", answer)


_SENTENCES = (
    "You are a helpful assistant. Describe this image in one sentence.",
    "What is shown in the picture, and what colour is it? Compare the first with the second.",
    "The quick brown fox jumps over the lazy dog while seven wizards box quietly.",
    "A red square stands between two blue circles; a green triangle lies below them.",
    "Several frames of the video show a train that leaves the station in heavy rain.",
    "Listen to the recording and write down every word the speaker says.",
    "Audio 1: someone knocks at the door. Audio 2: glass breaks, then there is silence.",
    "In the morning the children walk along the river to their school.",
    "An old lighthouse keeper counted ships until the fog came back.",
    "Please answer with yes or no, and explain your reasons afterwards.",
    "Numbers such as 0, 12, 345 and 6789 appear in tables, charts and invoices.",
    "Market prices rose by three percent; nobody expected such a change.",
    "She opened the window because the kitchen was full of smoke.",
    "Musicians practise slowly before they play a difficult piece in public.",
    "def first(items): return items[0] if items else None",
    "The system, the user and the assistant take turns in a conversation.",
    "Mountains, valleys and deserts look different from a satellite.",
    "Whoever finds the missing key should bring it to the front office.",
    "Doctors measured the patient's temperature twice during the night.",
    "Yesterday's newspaper mentioned a strange object above the harbour.",
    "Gardeners plant tulips in autumn and harvest potatoes in late summer.",
    "Can you read the small letters on the yellow sign behind the bicycle?",
    "Our library keeps maps, letters, photographs and handwritten diaries.",
    "Nothing happened for an hour, until suddenly the engine started again.",
    "Astronomers photographed a comet whose bright tail stretched across half the southern sky.",
    "Bakers knead dough, wait patiently and sprinkle flour over wooden boards.",
    "Eleven judges disagreed about the verdict, although the evidence seemed convincing.",
    "Fresh snow covered rooftops, fences and parked vehicles throughout the village.",
    "Engineers replaced copper wires by optical fibres to transmit more information per second.",
    "Translate this paragraph into Spanish, keeping names, dates and units unchanged.",
    "Which animal makes that noise: an owl, a wolf or maybe a frightened horse?",
    "Volunteers collected plastic bottles from beaches near the northern peninsula.",
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A trained byte-level BPE vocabulary: the id of each token, and the merges in order of rank."""

    ids: dict[str, int]
    merges: list[tuple[str, str]]

    def extended(self, tokens: Sequence[str]) -> dict[str, int]:
        """Return the ids with `tokens` after them."""
        return self.ids | {token: len(self.ids) + index for index, token in enumerate(tokens)}

    def spoken(self) -> list[int]:
        """The ids whose bytes are printable text by themselves: a model can generate them without breaking UTF-8."""
        from tokenizers.decoders import ByteLevel

        texts = ((ByteLevel().decode([token]), index) for token, index in self.ids.items())
        return sorted(index for text, index in texts if text.isprintable() and "\ufffd" not in text)


def train(size: int) -> Vocabulary:
    """Train exactly `size` tokens, including the 256 bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    if len(model["vocab"]) != size:
        raise ValueError(f"the sentences yield {len(model['vocab'])} tokens, not {size}: add sentences")
    return Vocabulary(ids=model["vocab"], merges=[(left, right) for left, right in model["merges"]])


def qwen2(vocabulary: Vocabulary, specials: Sequence[str], max_tokens: int) -> Qwen2Tokenizer:
    """Return the tokenizer of the Qwen2 models: it ends a turn with `<|im_end|>` and pads with `<|endoftext|>`."""
    from transformers import Qwen2Tokenizer

    named = ("<|im_end|>", "<|endoftext|>")
    return Qwen2Tokenizer(
        vocab=vocabulary.extended(specials),
        merges=vocabulary.merges,
        unk_token=None,
        eos_token=named[0],
        pad_token=named[1],
        extra_special_tokens=[token for token in specials if token not in named],
        model_max_length=max_tokens,
    )


def byte_level(
    vocabulary: Vocabulary, specials: Sequence[str], max_tokens: int, *, named: Mapping[str, str]
) -> PreTrainedTokenizerFast:
    """A tokenizer for families whose published models use several: what a file can say, without a class of its own.

    `named` maps roles to special tokens, as `{"eos_token": "</s>"}`; a role that transformers does not know becomes an
    attribute of the tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.extended(specials), merges=vocabulary.merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    own = {role: token for role, token in named.items() if role in PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES}
    further = {role: token for role, token in named.items() if role not in own}
    loaded = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=max_tokens, extra_special_tokens=further, **own
    )
    loaded.add_special_tokens({"extra_special_tokens": [token for token in specials if token not in named.values()]})
    return loaded
