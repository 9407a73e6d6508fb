"""The text of a long string in a request's JSON, as bytes of the body: megabytes of base64 never become a `str`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LongString"]


@dataclass(frozen=True, slots=True, repr=False)
class LongString:
    """A string of ASCII characters that have no escapes."""

    data: memoryview

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, part: slice) -> str:
        return str(self.data[part], "ascii")

    def __repr__(self) -> str:
        return f"LongString({self[:32]!r}…, {len(self):,} characters)"

    def from_(self, start: int) -> LongString:
        """The rest of the string, without a copy."""
        return LongString(self.data[start:])
