"""Shared parts for tests of semel and of programs built on it. Importing it does nothing."""
