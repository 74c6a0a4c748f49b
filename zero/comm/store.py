"""Exchanges of a few bytes through the store of a process group, before its ranks have a transport."""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
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
    """Exchanges a few bytes between the ranks, in rounds. The last rank to end it deletes their keys.

    `nonce`: a new name, the same on all ranks, for keys of their own: an earlier group of the same name, of which a
    rank may have died here, has left some. `host`: where the store is, as this rank reaches it.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        """ranks: of the job, that those of the group are."""
        self.rank, self.world, self.timeout, self._ranks = rank, len(ranks), timeout, ranks
        kept_by = store
        while isinstance(kept_by, dist.PrefixStore):
            kept_by = kept_by.underlying_store
        # The name or address of the host that keeps it, as this process reaches it.
        self.host = kept_by.host if isinstance(kept_by, dist.TCPStore) else "localhost"
        self.store, self._rounds = dist.PrefixStore("zero", store), 0
        self._drawn, self._read = ([f"{kind}/{rank}" for rank in range(self.world)] for kind in ("drawn", "read"))

    def __enter__(self) -> StoreRendezvous:
        store = self._outer = self.store
        store.set(self._drawn[self.rank], secrets.token_hex(8))
        self.nonce = ""

        def all_have_read() -> bool:
            """A rank that has read what an earlier one has left reads again, until all have read the same."""
            if not store.check(self._drawn):
                return False
            drawn = hashlib.sha256(b" ".join(store.multi_get(self._drawn))).hexdigest()[:16]
            if drawn != self.nonce:
                self.nonce = drawn
                store.set(self._read[self.rank], drawn)
            return store.check(self._read) and {*store.multi_get(self._read)} == {drawn.encode()}

        def others() -> list[int]:
            if missing := self._without(self._drawn) or self._without(self._read):
                return missing
            return [rank for rank, read in enumerate(store.multi_get(self._read)) if read != self.nonce.encode()]

        self._wait(all_have_read, others)
        self.store = dist.PrefixStore(self.nonce, store)
        return self

    def all_gather(self, data: bytes) -> list[bytes]:
        """Collective. Returns the data of every rank, by rank."""
        keys = [f"{self._rounds}/{rank}" for rank in range(self.world)]
        self._rounds += 1
        self.store.set(keys[self.rank], data.hex() or "-")
        self._wait(lambda: self.store.check(keys), lambda: self._without(keys))
        texts = [value.decode() for value in self.store.multi_get(keys)]  # one request, however many ranks there are
        return [b"" if text == "-" else bytes.fromhex(text) for text in texts]

    def address(self) -> str:
        """Collective. Returns an address of this host at which ranks of other hosts reach it; empty if there are
        none."""
        own, there = address_towards(self.host)
        told = [json.loads(text) for text in self.all_gather(json.dumps([own, there]).encode())]
        # Where the store is, the host may know its own name by a loopback address alone: others know it by another.
        return own or next((there for own, there in told if own), "")

    def _without(self, keys: list[str]) -> list[int]:
        """The ranks whose keys are not there."""
        return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

    def _wait(self, done: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """Waits until it is done. Raises RuntimeError at the time-out. missing: the ranks that are waited for."""
        # Not by `wait` of the store: it hears no Ctrl-C meanwhile.
        begun, pause, said = time.monotonic(), 0.001, False
        while not done():
            time.sleep(pause := min(2 * pause, 0.2))
            waited, limit = time.monotonic() - begun, self.timeout.total_seconds()
            if waited > min(limit, waiting.PATIENCE) and (waited > limit or not said):
                ranks = [self._ranks[rank] for rank in missing()]
                if waited > limit:
                    raise RuntimeError(f"rank {', '.join(map(str, ranks))} did not come within {limit:g} s")
                waiting.say_waiting(
                    self._ranks[self.rank], ranks, "the first operation of a group, as in zero.setup or FSDP(...)"
                )
                said = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(Exception):  # the store has ended, or cannot delete keys
            # Else a later rendezvous takes them for those of ranks that have not come to it. All ranks have read them
            # that have come to a round.
            for key in (self._drawn[self.rank], self._read[self.rank]) if self._rounds else ():
                self._outer.delete_key(key)
            if self.store.add("left", 1) == self.world:
                for number in range(self._rounds):
                    for rank in range(self.world):
                        self.store.delete_key(f"{number}/{rank}")
                self.store.delete_key("left")


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
    """The text of an error that a rank has raised, for ranks that find themselves out of step with it.

    `store`: of this group alone; None before its ranks have reached one another. `at`: how often ranks have compared
    their operations. One that is out of step with the rank that raised has done so as often, and later errors have
    another number.

    No method raises, or takes longer than a second: the store may have ended, or be out of reach."""

    def __init__(self) -> None:
        self.store: dist.Store | None = None
        self.at = 0
        self._published: str | None = None

    def publish(self, text: str) -> None:
        key, before = f"raised/{self.at}", self._published
        self._published = key

        def publish(store: dist.Store) -> None:
            store.set(key, text)
            if before not in (None, key):
                store.delete_key(before)

        self._ask(publish)

    @property
    def is_own(self) -> bool:
        """Whether this rank has raised since ranks have last compared their operations."""
        return self._published == f"raised/{self.at}"

    def explained(self, reason: str) -> str:
        """Returns the reason why a group is broken, with the text if there is one."""
        key = f"raised/{self.at}"
        text = self._ask(lambda store: store.get(key).decode() if store.check([key]) else None)
        if text is None:
            return reason
        return reason if text in reason else f"{text} ({reason})"

    def _ask(self, question: Callable[[dist.Store], Any]) -> Any:
        """Asks the store in a thread, and leaves that alone where it takes long. Returns the answer, or None."""
        answers: list[Any] = []
        store = self.store
        if store is None:
            return None

        def ask() -> None:
            with suppress(Exception):  # it has ended, cannot delete keys, or another rank has done it
                answers.append(question(store))

        asking = Thread(target=ask, daemon=True)
        with suppress(RuntimeError):  # none starts once the interpreter ends
            asking.start()
            asking.join(_ANSWERS)
        return answers[0] if answers else None
