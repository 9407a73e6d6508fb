"""Which `mm_processor_kwargs` a request may set.

They are keyword arguments of foreign code, some of which fetch URLs, open files, choose devices or pad to any length.
So names are taken from a list, and values are numbers and switches within a bound (threats S1, S5, S15).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from semel.errors import InvalidRequest

__all__ = ["check_options"]


def check_options(options: Mapping[str, object], allowed: Collection[str], *, max_value: int) -> None:
    """Refuse an option that is not listed, or whose value is not a bounded number, a switch, or a mapping to these."""
    for name, value in options.items():
        if name not in allowed:
            raise InvalidRequest(
                f"mm_processor_kwargs.{name[:64]}: not available; choose of {', '.join(sorted(allowed))}"
            )
        for part in value.values() if isinstance(value, Mapping) else (value,):
            if not isinstance(part, int | float) or not abs(part) <= max_value:
                raise InvalidRequest(
                    f"mm_processor_kwargs.{name}: must be a number up to {max_value:,}, or true or false"
                )
