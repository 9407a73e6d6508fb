"""Chats to prompts: messages, templates, the renderer."""
