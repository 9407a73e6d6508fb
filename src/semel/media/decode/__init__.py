"""Decoding bytes to pixels and samples, within limits."""
