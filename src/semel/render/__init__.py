"""From chat messages to a prompt: chat template, tokens, placeholders. Imports no torch, transformers or vLLM."""

from semel.render.assemble import assemble, assemble_encoder
from semel.render.chat import ChatRenderer
from semel.render.content_format import ContentFormat
from semel.render.messages import Attachment, Conversation, Message, Part, Text, ToolReference
from semel.render.pipeline import ChatRequest, Draft, Lookups, Make, Pipeline, Process, Rendered
from semel.render.source import media_from
from semel.render.template import ChatTemplate
from semel.render.tokenizer import Tokenizer
from semel.render.transcript import Insertion

__all__ = [
    "Attachment",
    "ChatRenderer",
    "ChatRequest",
    "ChatTemplate",
    "ContentFormat",
    "Conversation",
    "Draft",
    "Insertion",
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
]
