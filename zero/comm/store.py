"""Exchanges of a few bytes through the store of a process group, before its ranks have a transport."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from types import TracebackType
from typing import Any

import torch.distributed as dist

from zero.comm import waiting

# Seconds within which a store that can be reached answers.
_ANSWERS = 1.0


class StoreRendezvous:
    """Exchanges a few bytes between the ranks, in rounds. The last rank to end it deletes all keys, so that a later
    process group may use the same store.

    `nonce`: a new name, the same on all ranks. `host`: where the store is, as this rank reaches it.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: timedelta) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self.host = _host_of(store)
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
        texts = [value.decode() for value in self._store.multi_get(keys)]  # one request, however many ranks there are
        return [b"" if text == "-" else bytes.fromhex(text) for text in texts]

    def address(self) -> str:
        """Collective. Returns an address of this host at which ranks of other hosts reach it; empty if there are
        none."""
        own, there = address_towards(self.host)
        told = [json.loads(text) for text in self.all_gather(json.dumps([own, there]).encode())]
        # Where the store is, the host may know its own name by a loopback address alone: others know it by another.
        return own or next((there for own, there in told if own), "")

    def _wait(self, keys: list[str]) -> None:
        # Not by `wait` of the store, which hears no Ctrl-C.
        begun, pause, said = time.monotonic(), 0.001, False
        while not self._store.check(keys):
            waited = time.monotonic() - begun
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if waited > self.timeout.total_seconds():
                raise RuntimeError(f"rank {missing} did not come within {waited:.0f} s")
            if waited > waiting.PATIENCE and not said:
                waiting.say_waiting(self.rank, missing, "the first operation of a group, as in zero.setup or FSDP(...)")
                said = True
            time.sleep(pause := min(2 * pause, 0.2))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(Exception):  # the store has ended, or cannot delete keys
            if self._store.add("left", 1) == self.world:
                for number in range(self._rounds):
                    for rank in range(self.world):
                        self._store.delete_key(f"{number}/{rank}")
                self._store.delete_key("left")


def _host_of(store: dist.Store) -> str:
    """Returns the name or address of the host that keeps the store, as this process reaches it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else "localhost"


def address_towards(host: str) -> tuple[str, str]:
    """Returns the address of this host on the way to another, empty if that is this host itself, and the other's."""
    with suppress(OSError):
        family, kind, protocol, _, there = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as towards:
            towards.connect(there)  # of datagrams: this sends nothing
            own: str = towards.getsockname()[0]
        return "" if own.startswith("127.") or own == "::1" else own, str(there[0])
    return "", ""


class RaisedText:
    """The text of an error that a rank has raised, for ranks that find themselves out of step with it. store: of the
    group; None for one of a single rank.

    No method raises, or takes longer than a second: the store may have ended, or be out of reach."""

    def __init__(self, store: dist.Store | None) -> None:
        self._store = None if store is None else dist.PrefixStore("zero", store)

    def publish(self, text: str) -> None:
        self._ask(lambda store: store.set("raised", text))

    def withdraw(self) -> None:
        self._ask(lambda store: store.delete_key("raised"))

    def explained(self, reason: str) -> str:
        """Returns the reason why a group is broken, with the text if there is one."""
        text = self._ask(lambda store: store.get("raised").decode() if store.check(["raised"]) else None)
        if text is None:
            return reason
        return reason if text in reason else f"{text} ({reason})"

    def _ask(self, question: Callable[[dist.Store], Any]) -> Any:
        """Asks the store in a thread, and leaves that alone where it takes long. Returns the answer, or None."""
        answers: list[Any] = []
        store = self._store
        if store is None:
            return None

        def ask() -> None:
            with suppress(Exception):  # it has ended, cannot delete keys, or another rank has done it
                answers.append(question(store))

        asking = Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_ANSWERS)
        return answers[0] if answers else None
