"""From chat messages to a prompt: chat template, tokens, placeholders. Imports no torch, transformers or vLLM."""

from semel.render.chat.content_format import ContentFormat
from semel.render.chat.messages import MESSAGE, Attachment, Conversation, Message, Part, Text, ToolReference
from semel.render.chat.renderer import ChatRenderer, ChatRequest
from semel.render.chat.template import ChatTemplate
from semel.render.chat.template_messages import Insertion
from semel.render.inspector import Inspector
from semel.render.media.parsed_request import FeatureInfoOf, MakeFeature, ParsedRequest, ProcessItem, Rendered
from semel.render.media.source import MediaUrl, Source, source_from
from semel.render.media.source_fetch import Fetch, Intent, Spend
from semel.render.pipeline import Lookups, Pipeline, check_chars, has_parts
from semel.render.tokens.expand import expand, expand_encoder
from semel.render.tokens.tokenizer import Tokenizer
from semel.render.warmup import warm_up

__all__ = [
    "MESSAGE",
    "Attachment",
    "ChatRenderer",
    "ChatRequest",
    "ChatTemplate",
    "ContentFormat",
    "Conversation",
    "FeatureInfoOf",
    "Fetch",
    "Insertion",
    "Inspector",
    "Intent",
    "Lookups",
    "MakeFeature",
    "MediaUrl",
    "Message",
    "ParsedRequest",
    "Part",
    "Pipeline",
    "ProcessItem",
    "Rendered",
    "Source",
    "Spend",
    "Text",
    "Tokenizer",
    "ToolReference",
    "check_chars",
    "expand",
    "expand_encoder",
    "has_parts",
    "source_from",
    "warm_up",
]
