"""What a logger says while a test runs."""

from __future__ import annotations

import logging


class Heard(logging.Handler):
    """As a context manager: the messages of a logger, of a level and above, on this rank."""

    def __init__(self, name: str = "zero", level: int = logging.INFO) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.logger, self.asked = logging.getLogger(name), level

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> Heard:
        self.before = self.logger.level
        self.logger.addHandler(self)
        self.logger.setLevel(self.asked)
        return self

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.before)
