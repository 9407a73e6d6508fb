"""Values without I/O: digests, media, features, prompts. Of semel, imports only itself and `semel.errors`."""

from semel.core.answer_parsing import AnswerParsing
from semel.core.answer_settings import AnswerSettings
from semel.core.assembly import Assembly, AssemblyKind
from semel.core.contract import Contract, Field, Normalisation, Target
from semel.core.digest import Digest, Identity, Key, Tenant, digest, frame, hash_parts, tenant_name
from semel.core.embedding import FORM_DTYPES, Form, PrefetchedOutput, form_bytes
from semel.core.feature import DTYPE_BYTES, Feature, FeatureInfo, Origin, Tensor
from semel.core.keyring import MIN_KEY_CHARS, Keyring, is_key
from semel.core.layout import TOKEN_BYTES, Layout, pack_token_ids, unpack_token_ids
from semel.core.lru import LruMap
from semel.core.media import Media, Modality
from semel.core.probes import PROBE_BYTES, Probes
from semel.core.prompt import Item, Mask, Placeholder, Prompt, Timeline
from semel.core.rendering import Rendering
from semel.core.submission import Output, PromptLogprob, Submission
from semel.core.trace import Trace

__all__ = [
    "DTYPE_BYTES",
    "FORM_DTYPES",
    "MIN_KEY_CHARS",
    "PROBE_BYTES",
    "TOKEN_BYTES",
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
    "Layout",
    "LruMap",
    "Mask",
    "Media",
    "Modality",
    "Normalisation",
    "Origin",
    "Output",
    "Placeholder",
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
    "pack_token_ids",
    "tenant_name",
    "unpack_token_ids",
]
