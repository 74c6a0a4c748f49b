"""Sections of other libraries' configurations. No key is dropped without a message.

A key is applied (`take`), refused (`refuse`), or has no effect here (`without_effect`), and then one warning names it.
Keys that are left at the end are refused as unknown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zero._torch import warn_user

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
WRAPPING = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATE_DICT_TYPES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
NOT_SAID = (None, "auto", "none", "None", "")
"""Values by which a configuration leaves a key to its reader."""


class Keys:
    """The keys of one section.

    name: of the section, for messages. others: for each other name of a key the name by which it is read.
    Raises ValueError for a key that is given under two names with two values.
    """

    def __init__(self, given: Mapping[str, Any], name: str, others: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._left: dict[str, Any] = {}
        self._written: dict[str, str] = {}
        self._without_effect: dict[str, list[str]] = {}
        for written, value in given.items():
            read = (others or {}).get(written, written)
            if read in self._left and self._left[read] != value:
                raise ValueError(
                    f"{name}: {self._written[read]}={self._left[read]!r} and {written}={value!r} are two names of "
                    "one option. Keep one of them."
                )
            self._left[read], self._written[read] = value, written

    def take(self, name: str, read: Callable[[Any], Any] = lambda value: value, default: Any = None) -> Any:
        """A key's value, converted; `default` if it is not given. Raises ValueError if it cannot be converted."""
        value = self._left.pop(name, None)
        if value in NOT_SAID:
            return default
        try:
            return read(value)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self.title(name)}={value!r}: {error}") from error

    def title(self, name: str) -> str:
        """The key as it was written, with its section."""
        return f"{self.name}: {self._written.get(name, name)}"

    def says(self, name: str) -> bool:
        """Whether the key is given, with a value that switches something on."""
        return self._left.get(name) not in (*NOT_SAID, "false", 0)

    def refuse(self, names: str, reason: str) -> None:
        """Raises ValueError if one of the keys, separated by blanks, switches something on."""
        for name in names.split():
            if self.says(name):
                raise ValueError(f"{self.title(name)}={self._left[name]!r} is not available: {reason}")
            self._left.pop(name, None)

    def without_effect(self, names: str, reason: str) -> None:
        """Marks the keys, separated by blanks, as having no effect here. `done` warns of those that are given."""
        for name in names.split():
            if name in self._left and self._left.pop(name) not in NOT_SAID:
                self._without_effect.setdefault(reason, []).append(self._written[name])

    def done(self) -> None:
        """Raises ValueError for keys that were not read; warns once of those without an effect."""
        if self._left:
            raise ValueError(
                f"{self.name}: {', '.join(self._written[name] for name in self._left)} is not known to zero. "
                "Remove it, or use an option of zero.integrations.accelerate.ZeroPlugin instead."
            )
        if self._without_effect and int(os.environ.get("RANK", 0)) == 0:
            listed = [f"{', '.join(names)} ({reason})" for reason, names in self._without_effect.items()]
            warn_user(f"{self.name}: without an effect here: {'; '.join(listed)}.")


def flag(value: Any) -> bool:
    """A boolean. Raises ValueError for values that are neither true nor false."""
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        return value.lower() in ("true", "yes", "on", "1")
    raise ValueError("expected true or false")


def count(value: Any) -> int:
    """An integer, also from `5e8` and "100000000". Raises ValueError for values that are no integer of at least 0."""
    number = float(value)
    if number < 0 or number != int(number):
        raise ValueError("expected a whole number of at least 0")
    return int(number)


def names(value: Any) -> tuple[str, ...]:
    """Names from a list, or from text with commas between them."""
    given = value.split(",") if isinstance(value, str) else [*value]
    return tuple(name.strip() for name in given if name.strip())


def one_of(*known: str, numbered: bool = False) -> Callable[[Any], str]:
    """A reader of one of these names, in any case, or of an enum's member. numbered: or of its number, from 1 on."""

    def read(value: Any) -> str:
        if numbered and (isinstance(value, int) or (isinstance(value, str) and value.isdigit())):
            if not 1 <= int(value) <= len(known):
                raise ValueError(f"expected 1 to {len(known)}, or one of {', '.join(known)}")
            return known[int(value) - 1]
        name = str(getattr(value, "name", value)).upper().removeprefix("_")
        if name not in known:
            raise ValueError(f"expected one of {', '.join(known)}")
        return name

    return read
