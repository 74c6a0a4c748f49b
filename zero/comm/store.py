"""Exchanges of a few bytes through the store of a process group, before its ranks have a transport."""

from __future__ import annotations

import secrets
from contextlib import suppress
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from zero._torch import host_of
from zero.comm import waiting


class StoreRendezvous:
    """Exchanges a few bytes between the ranks, in rounds. The last rank to end it deletes all keys, so that a later
    process group may use the same store.

    `nonce`: a new name, the same on all ranks. `host`: where the store is, as this rank reaches it.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: timedelta) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self.host = host_of(store)
        self._store, self._rounds = dist.PrefixStore("zero", store), 0

    def __enter__(self) -> StoreRendezvous:
        self.nonce = self.all_gather(secrets.token_hex(8).encode())[0].decode()
        return self

    def all_gather(self, data: bytes) -> list[bytes]:
        """Collective. Returns the data of every rank, by rank."""
        keys = [f"{self._rounds}/{rank}" for rank in range(self.world)]
        self._rounds += 1
        self._store.set(keys[self.rank], data.hex() or "-")
        self._wait(keys)
        texts = [self._store.get(key).decode() for key in keys]
        return [b"" if text == "-" else bytes.fromhex(text) for text in texts]

    def _wait(self, keys: list[str]) -> None:
        patience = timedelta(seconds=waiting.PATIENCE)
        if patience < self.timeout:
            with suppress(dist.DistStoreError):
                self._store.wait(keys, patience)
                return
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            waiting.say_waiting(self.rank, missing, "the first operation of a group, as in zero.setup or FSDP(...)")
        self._store.wait(keys, self.timeout)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(Exception):  # the store has ended, or cannot delete keys
            if self._store.add("left", 1) == self.world:
                for number in range(self._rounds):
                    for rank in range(self.world):
                        self._store.delete_key(f"{number}/{rank}")
                self._store.delete_key("left")


class RaisedText:
    """The text of an error that a rank has raised, for ranks that find themselves out of step with it. store: of the
    group; None for one of a single rank."""

    def __init__(self, store: dist.Store | None) -> None:
        self._store = None if store is None else dist.PrefixStore("zero", store)

    def publish(self, text: str) -> None:
        with suppress(Exception):  # the store has ended
            if self._store is not None:
                self._store.set("raised", text)

    def withdraw(self) -> None:
        with suppress(Exception):  # it has ended, cannot delete keys, or another rank has done it
            if self._store is not None:
                self._store.delete_key("raised")

    def explained(self, reason: str) -> str:
        """Returns the reason why a group is broken, with the text if there is one."""
        with suppress(Exception):
            if self._store is not None and self._store.check(["raised"]):
                text = self._store.get("raised").decode()
                return reason if text in reason else f"{text} ({reason})"
        return reason
