"""Values without I/O: digests, media, features, prompts. Of semel, imports only itself and `semel.errors`."""

from semel.core.adapter import MAX_ADAPTER_NAME_CHARS, Adapter, AdapterChange, LatestChanges
from semel.core.contract import PROBE_BYTES, AnswerSettings, Contract, Field, Normalisation, Probes, Rendering, Target
from semel.core.digest import Digest, Identity, Key, Tenant, digest, frame, hash_parts, tenant_name
from semel.core.embedding import FORM_DTYPES, Form, PrefetchedOutput, form_bytes
from semel.core.feature import DTYPE_BYTES, Feature, FeatureInfo, Origin, Tensor
from semel.core.keyring import MIN_KEY_CHARS, Keyring, is_key
from semel.core.layout import TOKEN_BYTES, Assembly, AssemblyKind, Layout, pack_token_ids, unpack_token_ids
from semel.core.lru import LruMap
from semel.core.options import MEDIA_IO, VIDEO_OPTIONS, item_options, split_options, with_media_io
from semel.core.pooling import FLOAT_BYTES, POOLING_TASKS, PairForm, PoolingModel, PoolingOutput, PoolingTask
from semel.core.prompt import Item, Mask, Media, Modality, Page, Placeholder, Prompt, Timeline
from semel.core.submission import DEFAULT_WEIGHTS, AnswerParsing, Output, PromptLogprob, Submission, Trace

__all__ = [
    "DEFAULT_WEIGHTS",
    "DTYPE_BYTES",
    "FLOAT_BYTES",
    "FORM_DTYPES",
    "MAX_ADAPTER_NAME_CHARS",
    "MEDIA_IO",
    "MIN_KEY_CHARS",
    "POOLING_TASKS",
    "PROBE_BYTES",
    "TOKEN_BYTES",
    "VIDEO_OPTIONS",
    "Adapter",
    "AdapterChange",
    "AnswerParsing",
    "AnswerSettings",
    "Assembly",
    "AssemblyKind",
    "Contract",
    "Digest",
    "Feature",
    "FeatureInfo",
    "Field",
    "Form",
    "Identity",
    "Item",
    "Key",
    "Keyring",
    "LatestChanges",
    "Layout",
    "LruMap",
    "Mask",
    "Media",
    "Modality",
    "Normalisation",
    "Origin",
    "Output",
    "Page",
    "PairForm",
    "Placeholder",
    "PoolingModel",
    "PoolingOutput",
    "PoolingTask",
    "PrefetchedOutput",
    "Probes",
    "Prompt",
    "PromptLogprob",
    "Rendering",
    "Submission",
    "Target",
    "Tenant",
    "Tensor",
    "Timeline",
    "Trace",
    "digest",
    "form_bytes",
    "frame",
    "hash_parts",
    "is_key",
    "item_options",
    "pack_token_ids",
    "split_options",
    "tenant_name",
    "unpack_token_ids",
    "with_media_io",
]
