"""OpenAI's chats, completions, audio and files."""
