"""Shares of tenants in what they all use: bytes, places, time."""
