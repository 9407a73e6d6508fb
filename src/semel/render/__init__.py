"""From chat messages to a prompt: chat template, tokens, placeholders. Imports no torch, transformers or vLLM."""

from semel.render.assemble import assemble, assemble_encoder
from semel.render.chat import ChatRenderer
from semel.render.content_format import ContentFormat
from semel.render.draft import Draft, HoldingOf, Make, Process, Rendered
from semel.render.inspection import Inspector
from semel.render.intent import Intent
from semel.render.layouts import LayoutCache
from semel.render.messages import Attachment, Conversation, Message, Part, Text, ToolReference
from semel.render.pipeline import ChatRequest, Lookups, Pipeline
from semel.render.source import media_from
from semel.render.template import ChatTemplate
from semel.render.tokenizer import Tokenizer
from semel.render.transcript import Insertion
from semel.render.warmup import warm_up

__all__ = [
    "Attachment",
    "ChatRenderer",
    "ChatRequest",
    "ChatTemplate",
    "ContentFormat",
    "Conversation",
    "Draft",
    "HoldingOf",
    "Insertion",
    "Inspector",
    "Intent",
    "LayoutCache",
    "Lookups",
    "Make",
    "Message",
    "Part",
    "Pipeline",
    "Process",
    "Rendered",
    "Text",
    "Tokenizer",
    "ToolReference",
    "assemble",
    "assemble_encoder",
    "media_from",
    "warm_up",
]
