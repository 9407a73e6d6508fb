"""Fetching the bytes of URLs, under a policy."""
