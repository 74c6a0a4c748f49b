"""Sections of other libraries' configurations, of which no key is dropped in silence.

A key is honoured (`take`), refused (`refuse`), or has nothing to act on here, which one warning says by name. What is
left at the end is refused as unknown.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

NOT_SAID = (None, "auto", "none", "None", "")
"""Values by which a configuration leaves a key to its reader."""


class Keys:
    """The keys of one section.

    section: its name, for messages. others: other names of keys, each with the one that it is read by.
    Raises ValueError for a key that is there under two names with two values.
    """

    def __init__(self, given: Mapping[str, Any], section: str, others: Mapping[str, str] | None = None) -> None:
        self._section = section
        self._left: dict[str, Any] = {}
        self._written: dict[str, str] = {}
        self._without_effect: dict[str, list[str]] = {}
        for written, value in given.items():
            name = (others or {}).get(written, written)
            if name in self._left and self._left[name] != value:
                raise ValueError(
                    f"{section}: {self._written[name]}={self._left[name]!r} and {written}={value!r} are two names of "
                    "one option. Keep one of them."
                )
            self._left[name], self._written[name] = value, written

    def take(self, name: str, read: Callable[[Any], Any] = lambda value: value, default: Any = None) -> Any:
        """What is said of a key, read; `default` where nothing is. Raises ValueError for what cannot be read."""
        value = self._left.pop(name, None)
        if _not_said(value):
            return default
        try:
            return read(value)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self.title(name)}={value!r}: {error}") from error

    def title(self, name: str) -> str:
        """The key as it was written, with its section."""
        return f"{self._section}: {self._written.get(name, name)}"

    def says(self, name: str) -> bool:
        """Whether the key is there and asks for something."""
        value = self._left.get(name)
        if isinstance(value, Mapping):
            return bool(value) and value.get("enabled", True) is not False
        return not _not_said(value) and value is not False and value != "false" and value != 0

    def refuse(self, names: str, reason: str) -> None:
        """Raises ValueError where one of the keys, separated by blanks, asks for something."""
        for name in names.split():
            if self.says(name):
                raise ValueError(f"{self.title(name)}={self._left[name]!r} is not available: {reason}")
            self._left.pop(name, None)

    def without_effect(self, names: str, reason: str) -> None:
        """The keys, separated by blanks, have nothing to act on here. `done` says so of those that are there."""
        for name in names.split():
            if name in self._left and not _not_said(self._left.pop(name)):
                self._without_effect.setdefault(reason, []).append(self._written[name])

    def rest(self, refused: Mapping[str, str], without_effect: Mapping[str, str]) -> None:
        """All keys that are left: those refused with their reasons, and by reasons those without an effect; then
        `done`."""
        for names, reason in refused.items():
            self.refuse(names, reason)
        for reason, names in without_effect.items():
            self.without_effect(names, reason)
        self.done()

    def done(self) -> None:
        """Raises ValueError for keys that nobody asked about; warns once of those without an effect."""
        if self._left:
            raise ValueError(
                f"{self._section}: {', '.join(self._written[name] for name in self._left)} is not known to zero. "
                "Remove it, or say what it asks for by zero.integrations.accelerate.ZeroPlugin."
            )
        if self._without_effect and int(os.environ.get("RANK", 0)) == 0:
            told = [f"{', '.join(names)} ({reason})" for reason, names in self._without_effect.items()]
            warnings.warn(f"{self._section}: without an effect here: {'; '.join(told)}.", stacklevel=2)


def _not_said(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value in NOT_SAID)


def flag(value: Any) -> bool:
    """Raises ValueError for what is neither true nor false."""
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        return value.lower() in ("true", "yes", "on", "1")
    raise ValueError("expected true or false")


def count(value: Any) -> int:
    """Takes `5e8` and "100000000" too. Raises ValueError for what is no whole number of at least 0."""
    number = float(value)
    if number < 0 or number != int(number):
        raise ValueError("expected a whole number of at least 0")
    return int(number)


def names(value: Any) -> tuple[str, ...]:
    """Of a list, or of text in which commas separate them."""
    given = value.split(",") if isinstance(value, str) else [*value]
    return tuple(name.strip() for name in given if name.strip())


def one_of(*known: str) -> Callable[[Any], str]:
    """Reads text, or a member of an enum, that is one of these in whatever case."""

    def read(value: Any) -> str:
        name = str(getattr(value, "name", value)).upper()
        if name not in known:
            raise ValueError(f"expected one of {', '.join(known)}")
        return name

    return read
