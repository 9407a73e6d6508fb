"""A tiny Whisper: encoder-decoder, one clip of up to 30 s per request, 1,500 encoder positions.

All languages and timestamps are in the vocabulary, because transcription looks them up by name. The output head is the
table of token embeddings, so a token that is silenced in one is silenced in the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, Serving
from semel.lab.testing.models.text import Vocabulary

__all__ = ["FAMILIES"]

_VOCABULARY_TOKENS = 2048
_MODEL_SIZE = 128
_MEL_BINS = 80
_MAX_TARGET_POSITIONS = 448
_END = "<|endoftext|>"
_START = "<|startoftranscript|>"
_TASKS = ("translate", "transcribe")
_MARKS = ("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
_TIMESTAMPS = tuple(f"<|{step * 0.02:.2f}|>" for step in range(1501))
_CODES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml "
    "cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am "
    "yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue"
)
_LANGUAGES = tuple(f"<|{code}|>" for code in _CODES.split())
_SPECIAL_TOKENS = (_END, _START, *_LANGUAGES, *(f"<|{task}|>" for task in _TASKS), *_MARKS)


def _tokenizer(vocabulary: Vocabulary) -> Any:
    from transformers import WhisperTokenizer

    return WhisperTokenizer(
        vocab=vocabulary.extended([*_SPECIAL_TOKENS, *_TIMESTAMPS]),
        merges=vocabulary.merges,
        pad_token=_END,
        extra_special_tokens=list(_SPECIAL_TOKENS[1:]),
        model_max_length=_MAX_TARGET_POSITIONS,
    )


def _processor(tokenizer: Any) -> Any:
    from transformers import WhisperFeatureExtractor, WhisperProcessor

    return WhisperProcessor(WhisperFeatureExtractor(feature_size=_MEL_BINS), tokenizer)


def _config(id_of: IdOf) -> Any:
    from transformers import WhisperConfig

    end = id_of(_END)
    return WhisperConfig(
        architectures=["WhisperForConditionalGeneration"],
        dtype="float32",
        vocab_size=_VOCABULARY_TOKENS,
        num_mel_bins=_MEL_BINS,
        d_model=_MODEL_SIZE,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=2 * _MODEL_SIZE,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=2 * _MODEL_SIZE,
        max_source_positions=1500,
        max_target_positions=_MAX_TARGET_POSITIONS,
        decoder_start_token_id=id_of(_START),
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        begin_suppress_tokens=None,
    )


def _generation(id_of: IdOf) -> Mapping[str, Any]:
    return {
        "bos_token_id": id_of(_END),
        "decoder_start_token_id": id_of(_START),
        "is_multilingual": True,
        "lang_to_id": {language: id_of(language) for language in _LANGUAGES},
        "max_initial_timestamp_index": 50,
        "max_length": _MAX_TARGET_POSITIONS,
        "no_timestamps_token_id": id_of("<|notimestamps|>"),
        "prev_sot_token_id": id_of("<|startofprev|>"),
        "return_timestamps": False,
        "task_to_id": {task: id_of(f"<|{task}|>") for task in _TASKS},
    }


FAMILIES = (
    Declaration(
        family="whisper",
        config=_config,
        shapes=weights.of_class("WhisperForConditionalGeneration"),
        processor=_processor,
        special_tokens=_SPECIAL_TOKENS,
        plain_tokens=_TIMESTAMPS,
        own_tokenizer=_tokenizer,
        vocabulary_tokens=_VOCABULARY_TOKENS,
        end=_END,
        pad=_END,
        chat_template=None,
        generation=_generation,
        gains={
            "*.encoder.conv1.weight": 10.0,
            "*.encoder.conv2.weight": 4.0,
            "*.encoder.embed_positions.weight": 0.6,
            "*.encoder.*.q_proj.weight": 1.5,
            "*.encoder.*.k_proj.weight": 1.5,
            "*.encoder.*.out_proj.weight": 0.7,
            "*.decoder.embed_*.weight": 0.1,
            "*.decoder.layer_norm.weight": 3.0,
            "*.encoder_attn.q_proj.weight": 2.5,
            "*.encoder_attn.k_proj.weight": 2.5,
            "*.encoder_attn.v_proj.weight": 3.0,
            "*.out_proj.weight": 2.0,
            "*.fc1.weight": 1.5,
            "*.fc2.weight": 1.5,
        },
        end_gain=0.7,
        head="model.decoder.embed_tokens.weight",
        tied="proj_out.weight",
        serving=Serving(max_items={"audio": 1}, max_model_len=448, flags=("--max-num-batched-tokens", "3200")),
    ),
)
