"""What one rank raises, as the others raise it: of the same class, so that no `except` of the user's parts them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from zero.comm.oplog import Log

_LONGEST = 1 << 16  # characters of a text: each rank gets that of every other

_TOLD = "told_to_ranks"


def text_of(error: BaseException) -> str:
    """The error's own text, as it can be sent: file names may be no UTF-8, compilers write for pages, and a class of
    the user's may fail to say anything."""
    try:
        text = str(error)
    except Exception as failure:
        text = f"(its text is not known: {type(failure).__name__})"
    return text[:_LONGEST].encode(errors="backslashreplace").decode()


def described(error: BaseException, text: str) -> dict[str, Any]:
    """The error as it is sent: by the names of its classes, and with another text."""
    classes = [one for one in type(error).__mro__ if issubclass(one, Exception)]
    return {"classes": [[one.__module__, one.__qualname__] for one in classes], "text": text}


def rebuilt(error: dict[str, Any]) -> Exception:
    """Returns an error of the first of its classes that this process knows and that takes a text."""
    text = error["text"]
    for module, name in error["classes"][:-1]:  # the last is Exception, which says nothing
        found: Any = sys.modules.get(module)
        for attribute in name.split("."):
            found = getattr(found, attribute, None)
        if isinstance(found, type) and issubclass(found, Exception):
            with suppress(Exception):
                made = found(text)
                if any(text in str(one) for one in (made, *made.args)):
                    return made
        text = text if name in text else f"{name}: {text}"
    return RuntimeError(text)


def dumped(error: Exception, rank: str) -> str:
    """What a rank that raises the error sends to the others."""
    return json.dumps(described(error, f"rank {rank} has raised {type(error).__name__}: {text_of(error)}"))


def loaded(sent: str) -> Exception:
    return rebuilt(json.loads(sent))


def mark_told(error: BaseException, logs: Sequence[Log]) -> None:
    """Notes that all ranks of these groups raise it, too, now."""
    vars(error)[_TOLD] = [(log, log.sections_entered, log.position) for log in logs]


def is_told(error: BaseException, logs: Sequence[Log]) -> bool:
    """Returns whether all ranks of these groups were told of it, as long as it is on its way out of one call: the same
    object may be raised again in a later one."""
    told = {log: (entered, at) for log, entered, at in vars(error).get(_TOLD, ())}
    for log in logs:
        entered, at = told.get(log, (None, None))
        if entered != log.sections_entered or not (log.sections or at == log.position):
            return False
    return True
