"""Tiny models of Idefics3 and SmolVLM: an image in tiles, each after a mark of its row and column, and then the whole.

The marks and line ends between the tiles have no embedding, so a placeholder has a mask. SmolVLM has marks of its own;
its processor needs the package num2words. The tensors have the names of the published checkpoints
(`model.vision_model.`, `model.connector.`, `model.text_model.`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, Serving
from semel.lab.testing.models.text import NORM_EPSILON, chat_template, text_config

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 32_768
_TILE_SIDE = 56
_PATCH_SIDE = 14
_SCALE = 2
_MARKS = {
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
}
_TILE_MARKS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))

_IDEFICS3_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {{- message.role | capitalize -}}
  {%- if message.content is string -%}
    {{- ': ' + message.content -}}
  {%- else -%}
    {{- ':' if message.content[0].type in ('image', 'image_url') else ': ' -}}
    {%- for part in message.content -%}
      {%- if part.type in ('image', 'image_url') -%}
        {{- '<image>' -}}
      {%- else -%}
        {{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<end_of_utterance>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- 'Assistant:' -}}
{%- endif -%}
"""

_SMOLVLM_TEMPLATE = chat_template(
    {"image": "<image>"},
    start="bos_token",
    turn="message.role | capitalize + ': '",
    end="'<end_of_utterance>\\n'",
    answer="'Assistant:'",
)
_SIZES = {"size": {"longest_edge": 4 * _TILE_SIDE}, "max_image_size": {"longest_edge": _TILE_SIDE}}
_TILE_TOKENS = (_TILE_SIDE // _PATCH_SIDE // _SCALE) ** 2


def _idefics3_processor(tokenizer: Any) -> Any:
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    images = Idefics3ImageProcessor(**_SIZES)
    return Idefics3Processor(images, tokenizer, image_seq_len=_TILE_TOKENS, chat_template=_IDEFICS3_TEMPLATE)


def _smolvlm_processor(tokenizer: Any) -> Any:
    from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    images, videos = SmolVLMImageProcessor(**_SIZES), SmolVLMVideoProcessor(**_SIZES)
    return SmolVLMProcessor(images, tokenizer, videos, image_seq_len=_TILE_TOKENS, chat_template=_SMOLVLM_TEMPLATE)


def _family(
    name: str,
    processor: Callable[[Any], Any],
    named: Mapping[str, str],
    marks: Mapping[str, str],
    template: str,
    own: Mapping[str, Any],
) -> Declaration:
    """Return one of the families; `name` is that of its classes, `own` are values of both its configurations."""

    def config(id_of: IdOf) -> Any:
        import transformers

        return getattr(transformers, f"{name}Config")(
            architectures=[f"{name}ForConditionalGeneration"],
            dtype="float32",
            image_token_id=id_of("<image>"),
            pad_token_id=id_of("<|pad|>"),
            scale_factor=_SCALE,
            text_config=text_config(
                _MAX_POSITIONS,
                bos=id_of(named["bos_token"]),
                eos=id_of("<end_of_utterance>"),
                model_type="llama",
                rms_norm_eps=NORM_EPSILON,
                pad_token_id=id_of("<|pad|>"),
                **own,
            ),
            vision_config={
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": _TILE_SIDE,
                "patch_size": _PATCH_SIDE,
                "dtype": "float32",
            },
            **own,
        )

    return Declaration(
        family=name.lower(),
        config=config,
        shapes=weights.of_class(f"{name}ForConditionalGeneration"),
        processor=processor,
        special_tokens=(*named.values(), *marks.values(), *_TILE_MARKS),
        named_tokens=named,
        end="<end_of_utterance>",
        pad="<|pad|>",
        chat_template=template,
        gains={
            "*.patch_embedding.weight": 2.0,
            "*.position_embedding.weight": 3.0,
            "*.vision_model.*.q_proj.weight": 1.5,
            "*.vision_model.*.k_proj.weight": 1.5,
            "*.modality_projection.proj.weight": 2.0,
        },
        serving=Serving(max_items={"image": 4}),
    )


def _named(begin: str) -> dict[str, str]:
    return {"bos_token": begin, "eos_token": "<end_of_utterance>", "pad_token": "<|pad|>"}


FAMILIES = (
    _family("Idefics3", _idefics3_processor, _named("<|begin_of_text|>"), _MARKS, _IDEFICS3_TEMPLATE, {}),
    _family(
        "SmolVLM",
        _smolvlm_processor,
        {**_named("<|im_start|>"), **_MARKS},
        {},
        _SMOLVLM_TEMPLATE,
        {"tie_word_embeddings": False},
    ),
)
