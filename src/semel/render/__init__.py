"""From chat messages to a prompt: chat template, tokens, placeholders. Imports no torch, transformers or vLLM."""

from semel.render.chat import ChatRenderer
from semel.render.content_format import ContentFormat
from semel.render.draft import Draft, HoldingOf, Make, Process, Rendered
from semel.render.expand import assemble, assemble_encoder
from semel.render.inspection import Inspector
from semel.render.intent import Intent
from semel.render.messages import MESSAGE, Attachment, Conversation, Message, Part, Text, ToolReference
from semel.render.pipeline import ChatRequest, Lookups, Pipeline, check_chars
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
    "Draft",
    "Fetch",
    "HoldingOf",
    "Insertion",
    "Inspector",
    "Intent",
    "Lookups",
    "Make",
    "MediaUrl",
    "Message",
    "Part",
    "Pipeline",
    "Process",
    "Rendered",
    "Source",
    "Spend",
    "Text",
    "Tokenizer",
    "ToolReference",
    "assemble",
    "assemble_encoder",
    "check_chars",
    "source_from",
    "warm_up",
]
