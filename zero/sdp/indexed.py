"""What a wrapper shows of a module that is a container: its length, and what lies in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Indexed:
    """Around `module`, which may be an nn.Sequential or another container. Of others it raises TypeError as they do."""

    module: Any

    def __len__(self) -> int:
        return len(self.module)

    def __bool__(self) -> bool:
        return True  # as of any module, also where it has no length

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)
