"""Tokenizers, placeholder tokens and their expansion."""
