"""Structured outputs under bounds: the trial of a grammar, and the cost of following it."""
