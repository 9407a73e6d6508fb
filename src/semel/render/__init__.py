"""From chat messages to a prompt: chat template, tokens, placeholders. Imports no torch, transformers or vLLM."""

from semel.render.chat import ChatRenderer
from semel.render.chat_request import ChatRequest
from semel.render.content_format import ContentFormat
from semel.render.draft import FeatureInfoOf, MakeFeature, ParsedRequest, ProcessItem, Rendered
from semel.render.expand import expand, expand_encoder
from semel.render.inspector import Inspector
from semel.render.intent import Intent
from semel.render.messages import MESSAGE, Attachment, Conversation, Message, Part, Text, ToolReference
from semel.render.pipeline import Lookups, Pipeline, check_chars
from semel.render.source import MediaUrl, Source, source_from
from semel.render.source_fetch import Fetch, Spend
from semel.render.template import ChatTemplate
from semel.render.template_messages import Insertion
from semel.render.tokenizer import Tokenizer
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
    "source_from",
    "warm_up",
]
