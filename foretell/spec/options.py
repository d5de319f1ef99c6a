"""A scheme's own options: a frozen dataclass, read from the strings of ``name=value``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")

_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def read_options(options: type[T], given: dict[str, str], method: str) -> T:
    """Reads ``given`` into the dataclass ``options``, whose fields are str, int, float or bool.

    Args:
        method: the scheme's name, for messages.

    Raises:
        ValueError: an option the scheme does not have, or a value it does not take.
    """
    types = get_type_hints(options)
    legal = [f.name for f in fields(options)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in legal:
            own = ", ".join(legal) or "none of its own"
            raise ValueError(
                f"{method} has no option {name!r}: its options are {own}, "
                "besides k, verification, threshold and adaptive"
            )
        values[name] = _read(types[name], text, f"{method} option {name}={text!r}")
    try:
        return options(**values)
    except ValueError as error:
        raise ValueError(f"{method} option {error}") from None


def _read(kind: type, text: str, what: str) -> Any:
    if kind is bool:
        if text.lower() not in _YES + _NO:
            raise ValueError(f"{what}: must be true or false")
        return text.lower() in _YES
    try:
        return kind(text)
    except ValueError:
        noun = "a whole number" if kind is int else "a number"
        raise ValueError(f"{what}: must be {noun}") from None
