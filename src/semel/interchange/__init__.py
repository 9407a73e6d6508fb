"""Formats of files and HTTP bodies, not of the wire. Pure: bytes in, values out."""
