"""The watchdog of a process group: a thread that ends the waiting of all ranks when one of them is missing.

The host, or the device, of a rank may wait in vain: for a rank that has ended or was stopped, or because ranks are out
of step and wait in different operations. NCCL then ends the process after the group's timeout. (Over host memory a rank
learns of the end of another by their pipe, too, which costs nothing.)

Each process has a thread for each group. Every rank is connected with the first one, to which it says where it is: the
`Hub` there keeps the last state of every rank, knows when a process ends, as the system then closes its connection, and
comes to one verdict for all. Where a rank is missing, logs differ, or ranks can never meet, it tells all ranks. Their
`Watchdog` marks the log of the group as broken, which also aborts what runs on the device: a host that waits for the
device goes on, and the next call of zero raises what the hub has found.

A settled step pays nothing: the thread looks five times a second where the log is.

A message is a line of JSON.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from threading import Event, RLock, Thread, current_thread
from types import FrameType
from typing import Any
from weakref import finalize, ref

import torch.distributed as dist
import torch.utils.data

from zero.comm import waiting
from zero.comm.forked import held
from zero.comm.host_memory import Peers
from zero.comm.oplog import Log, Position
from zero.comm.store import StoreRendezvous, address_towards
from zero.comm.transport import wait_watching

# -------------------------------------------------------------------------------------------------- where a rank stands
#
# Where all threads of a process stand, as far as that says what it can never come to.
#
# A rank that waits within zero for another one, and that one in a collective of torch.distributed, such as barrier() or
# an all_reduce() of the user's, can meet only if a further thread of either makes the other's call. Where neither has
# such a thread they never meet. Over NCCL collectives do not block the host: there the time-out tells.


WITHIN_ZERO = "zero"

_WAITS = {wait_watching.__code__, Peers.wait_for.__code__}
_COLLECTIVES: list[Any] = [
    *(dist.all_reduce, dist.reduce, dist.broadcast, dist.broadcast_object_list, dist.barrier, dist.monitored_barrier),
    *(dist.all_gather, dist.all_gather_into_tensor, dist.all_gather_object, dist.gather, dist.gather_object),
    *(dist.reduce_scatter, dist.reduce_scatter_tensor, dist.scatter, dist.scatter_object_list),
    *(dist.all_to_all, dist.all_to_all_single),
]
_BLOCKING = {inspect.unwrap(one).__code__: f"torch.distributed.{one.__name__}()" for one in _COLLECTIVES}
# Threads of these call neither zero nor a barrier: torch's data loading, and what waits in the standard library.
_IDLE = (str(Path(torch.utils.data.__file__).parent), str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"))
_OTHERS = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def standing() -> tuple[int, str, list[int]] | None:
    """Returns an identity, in what this process waits, and of which ranks of the job if that is a collective of torch;
    None if it may go on, or another of its threads may call something."""
    frames, found = sys._current_frames(), []
    for thread in threading.enumerate():
        # Names of files, and no frames: one that is held when its call ends keeps what the call has held.
        files, waits, frame = list[str](), None, frames.pop(thread.ident or 0, None)
        while frame is not None:
            if not isinstance(frame, FrameType):  # the thread has gone on meanwhile, and Python's memory of its frames
                return None
            files.append(frame.f_code.co_filename)
            if frame.f_code in _WAITS:
                waits = id(frame), WITHIN_ZERO, None
            elif frame.f_code in _BLOCKING and (waits is None or waits[1] != WITHIN_ZERO):
                # The outermost: what the user has called.
                waits = id(frame), _BLOCKING[frame.f_code], frame.f_locals.get("group")
            frame = frame.f_back
        if waits is not None:
            found.append(waits)
        # A timer waits in the standard library for the time to call what the user has given it.
        elif thread is not threading.current_thread() and (
            isinstance(thread, threading.Timer) or not all(map(_is_idle, files))
        ):
            return None
    if len(found) != 1:
        return None
    number, where, group = found[0]
    if where == WITHIN_ZERO:
        return number, where, []
    try:
        return number, where, dist.get_process_group_ranks(group)
    except (RuntimeError, ValueError, KeyError):  # the group is being destroyed
        return None


def _is_idle(file: str) -> bool:
    return file.startswith(_IDLE[:2]) or (file.startswith(_IDLE[2]) and not file.startswith(_OTHERS)) or file[:1] == "<"


# ---------------------------------------------------------------------------------------------------------- the verdict
#
# What the first rank of a group knows of all ranks, and what follows from it.


Message = dict[str, Any]

APART = 10.0
"""Seconds for which ranks stand where they can never meet before all are told. What is met takes less."""

_SILENT = "has not answered for {:.0f} s: its process stands still, or its host or the link to it is lost"


@dataclass
class State:
    """What a rank has said last of itself.

    heard: when. at: its position. log: its last operations if it stands there, `since` then; None while it moves.
    held: in what it waits there if none of its threads can do anything else, and of which ranks of the
    job, `held_since` then. failed: its error, if a transfer failed there. gone: how it has ended, empty if in order;
    None while it runs.
    """

    heard: float
    at: Position = (0, 0)
    log: list[int] | None = None
    since: float = 0.0
    held: tuple[str, list[int]] | None = None
    held_since: float = 0.0
    failed: str | None = None
    gone: str | None = None


class Hub:
    """limit: seconds for which ranks wait for another."""

    def __init__(self, log: Log, limit: float) -> None:
        self._log, self._limit, self._ranks = log, limit, log.ranks
        self._states: dict[int, State] = {}
        self._new: set[int] = set()  # ranks whose log was not compared since they said where it stands
        self._looked = time.monotonic()
        self._waits_at: Position = (0, 0)  # for which ranks were last told that they wait for others
        self._asked_at: dict[int, Position] = {}  # where all ranks were when they were last asked in what they stand

    def hear(self, rank: int, message: Message) -> None:
        """Takes what a rank says of itself: changes of its State. An empty message says that it runs."""
        now = time.monotonic()
        state = self._states.setdefault(rank, State(now))
        state.heard = now
        if "at" in message:
            state.at, state.log, state.since, state.held = tuple(message["at"]), message["log"], now, None
            self._new.add(rank)
        if "unwatched" in message:
            del self._states[rank]
            return
        if "held" in message:
            state.held, state.held_since = message["held"] and tuple(message["held"]), now
        state.failed, state.gone = message.get("failed", state.failed), message.get("gone", state.gone)

    def lose(self, rank: int) -> None:
        """Takes the end of the connection of a rank. One that has said that it ended is no loss."""
        if rank in self._states and self._states[rank].gone is None:
            self._states[rank].gone = "has stopped"

    def verdict(self) -> Message | None:
        """What all ranks are to be told now: which rank is missing ("missing", "how"), why the group is broken
        ("failed", "by" a rank, or all), that they are to say in what they stand ("asked"), or once in a while for whom
        those that have come furthest wait ("behind", "at")."""
        now = time.monotonic()
        if now - self._looked > self._limit / 4:  # this process was stopped itself, and has heard nobody meanwhile
            for state in self._states.values():
                state.heard = now
        self._looked = now
        standing = {rank: state for rank, state in self._states.items() if state.log is not None and state.gone is None}
        furthest = max((state.at for state in standing.values()), default=(0, 0))
        long = max((state.at for state in standing.values() if now - state.since > self._limit), default=(0, 0))
        failed, by = None, None
        for rank, state in self._states.items():
            how = state.gone
            if how is None and now - state.heard > self._limit:
                how = _SILENT.format(self._limit)
            elif how is None and rank in standing and now - state.since > self._limit and state.at < long:
                how = f"has not reached the next operation for {self._limit:.0f} s, in which other ranks wait"
            elif how == "" and state.at < furthest:
                how = "has ended before it reached this operation"
            if how:
                return {"missing": rank, "how": how}
            if state.failed and not failed:
                failed, by = state.failed, rank
        if failed or (failed := self._differing(standing) or self._apart(standing, furthest, now)):
            return {"failed": failed, "by": by}
        return self._asking(standing, furthest, now) or self._behind(standing, furthest, now)

    def _differing(self, standing: dict[int, State]) -> str | None:
        """Compares each log that is new with the longest other one."""
        # Each comparison empties the logs: after different ones they begin at different operations.
        longest: dict[int, list[int]] = {}  # the two longest, by the number of comparisons
        for rank, state in standing.items() if self._new else ():
            two = [*longest.get(state.at[0], []), rank]
            longest[state.at[0]] = sorted(two, key=lambda one: standing[one].at, reverse=True)[:2]
        new, self._new = self._new & standing.keys(), set()
        for rank in new:
            for other in [one for one in longest[standing[rank].at[0]] if one != rank][:1]:
                if (standing[rank].at, standing[rank].log) == (standing[other].at, standing[other].log):
                    continue  # at once: thousands may stand in one place
                histories = {one: (standing[one].at[1], standing[one].log or []) for one in (rank, other)}
                channels = self._log.difference(histories)
                if channels:
                    return self._log.channels.differing(dict(sorted(channels.items())))
        return None

    def _apart(self, standing: dict[int, State], furthest: Position, now: float) -> str | None:
        """Says that ranks can never meet: all of them have long stood where they can do nothing else, some in an
        operation of zero that the others have not launched, and these in a collective of torch of which those are
        part."""
        if len(standing) < len(self._ranks):
            return None
        if any(state.held is None or now - state.held_since < APART for state in standing.values()):
            return None
        held = {rank: state.held for rank, state in standing.items() if state.held is not None}
        here = sorted(rank for rank, (where, _) in held.items() if where == WITHIN_ZERO)
        there = sorted(held.keys() - {*here})
        if not here or not there or any((standing[rank].at == furthest) != (rank in here) for rank in standing):
            return None
        for rank in there:
            called = {*held[rank][1]}
            if not called <= {*self._ranks} or not called & {self._ranks[one] for one in here}:
                return None
        channel = (standing[here[0]].log or [0])[-1]
        names = [", ".join(str(self._ranks[rank]) for rank in ranks) for ranks in (here, there)]
        return (
            f"ranks can never meet: rank {names[0]} waits in {self._log.channels.name(channel)} for rank {names[1]}, "
            f"which waits in {held[there[0]][0]}. Training, evaluation and saving are collective: call them on every "
            "rank, in one order with collectives of your own; zero.full_state_dict(model, to=0) returns weights on "
            "rank 0 alone, and zero.join takes different numbers of batches."
        )

    def _asking(self, standing: dict[int, State], furthest: Position, now: float) -> Message | None:
        """Once all ranks stand, some of them behind: only then do they look at the frames of their threads, which keeps
        what calls hold that end meanwhile."""
        at = {rank: state.at for rank, state in standing.items()}
        stood = min((now - state.since for state in standing.values()), default=0.0)
        if len(at) < len(self._ranks) or {*at.values()} == {furthest} or stood < _LOOKS or at == self._asked_at:
            return None
        self._asked_at = at
        return {"asked": True}

    def _behind(self, standing: dict[int, State], furthest: Position, now: float) -> Message | None:
        """Once ranks that have come furthest have stood there for long: who is not there. One whose log moves sends no
        position, and whatever it reaches is compared with the log of those."""
        there = {rank for rank, state in standing.items() if state.at == furthest}
        behind = sorted(rank for rank, state in self._states.items() if state.gone is None and rank not in there)
        long = any(now - standing[rank].since > waiting.PATIENCE for rank in there)
        if not long or not behind or furthest == self._waits_at:
            return None
        self._waits_at = furthest
        return {"behind": behind, "at": furthest}


# ----------------------------------------------------------------------------------------------------------- the thread


# Seconds between two looks at the log of this rank.
_TICK = 0.2

# Seconds between two looks at where the threads of a rank stand whose log does not move, and before the first.
_LOOKS = 1.0

# Seconds after which a rank that has nothing to say says that it lives, at most.
_BEAT = 30.0

# Reports that the hub is to read in a second, at most: ranks of large groups report later that their log stands.
_REPORTS = 400

# Seconds for which a rank that fails tries to tell the others, and waits for their word on who is missing.
_SAYS = 1.0

# How long a rank tries to reach the first one. Without it, the rank is not watched.
_CONNECTS = 10.0

# Bytes of a message; characters of an error in it, of up to 12 bytes each in JSON.
_LONGEST, _LONGEST_REASON = 1 << 20, 1 << 16


class Watchdog:
    """Collective. Watches a group as long as `user` lives, which holds its log, or as this process does.

    timeout: how long ranks wait for one another. Who is missing is found a little sooner, since NCCL then ends the
        process.
    """

    def __init__(self, user: object, log: Log, exchange: StoreRendezvous, timeout: timedelta) -> None:
        self._log, self._rank, self._nonce = log, exchange.rank, exchange.nonce
        self._own = log.own
        self._limit = timeout.total_seconds() - min(10.0, timeout.total_seconds() / 10)
        self._hub = None if self._rank else Hub(log, self._limit)
        self._lock, self._word, self._process = RLock(), Event(), os.getpid()
        self._peers: dict[socket.socket, Peer] = {}
        self._ready = DefaultSelector()
        self._learned = self._ended = False
        self._state: Message = {}  # what this rank has said last, for the hub to hear once it is connected
        self._verdict: Message = {}  # what the hub has found last
        # Where this rank's log was last, since when, whether the hub was told, and seconds after which it is.
        self._at, self._since, self._told = (0, 0), time.monotonic(), False
        self._held: tuple[int, str, list[int]] | None = None  # where this process stands, and can do nothing else
        self._asked, self._looked = False, 0.0
        self._stands = max(2 * _TICK, exchange.world / _REPORTS)
        self._said = self._heard = time.monotonic()
        self._hub_at: Position | None = None  # where the hub was when it ended
        self._listening: socket.socket | None = None
        own: tuple[str, int] | tuple[()] = ()
        if self._hub is not None:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._listening = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
            own = address_towards(exchange.host)[0], self._listening.getsockname()[1]
            held.add(self._listening)
            self._ready.register(self._listening, EVENT_READ)
        host, port = json.loads(exchange.all_gather(json.dumps(own).encode())[0])
        log.failure.at_failure.insert(0, self._fail)  # before transfers are aborted, which may take long
        log.failure.inquire = lambda: self._word.wait(_SAYS / 2)
        there = host or exchange.host, port
        self._thread = Thread(target=self._run, args=(there,), name="zero-watchdog", daemon=True)
        self._thread.start()
        finalize(user, self._end, ref(user))

    # ------------------------------------------------------------------------------------------ in any thread

    def _fail(self, reason: str) -> None:
        """Tells the other ranks that this one has failed."""
        # What this rank was told the others know; and a forked process speaks for no rank.
        if not self._learned and self._process == os.getpid():
            self._say({"failed": reason[:_LONGEST_REASON]})
        self._word.set()

    def _end(self, user: ref[object]) -> None:
        """Says that this rank uses the group no more: it has dropped the group, or its process ends."""
        if self._process != os.getpid():
            return
        # Where the user is gone, an error that nobody caught was another one, as in an earlier cell of a notebook.
        error: BaseException | None = getattr(sys, "last_value", None) if user() is not None else None
        how = "" if error is None else f"has ended with {type(error).__name__}: {str(error)[:500]}"
        self._say({"at": self._log.position, "log": None, "gone": how})
        self._ended = True  # the thread closes the connections
        self._log.failure.at_failure.remove(self._fail)  # the log and this refer to each other
        self._log.failure.inquire = lambda: None
        if user() is None and current_thread() is not self._thread:
            self._thread.join(_SAYS)

    def _say(self, message: Message) -> None:
        """Says something of this rank to the hub."""
        with self._lock:
            self._said = time.monotonic()
            if self._hub is None:
                self._state.update(message)
                self._send(message)
                return
            self._hub.hear(0, message)
            if "gone" in message:  # the hub alone has heard it; others would take the end of the connection for a loss
                self._send(message)
            self._tell()

    def _send(self, message: Message) -> None:
        """Sends to the first rank, or from it to all others that are connected."""
        data = json.dumps(message).encode() + b"\n"
        for peer in self._peers.values():
            if peer.rank is not None:
                with suppress(OSError):
                    peer.connected.sendall(data)

    def _tell(self) -> None:
        """Tells all ranks what the hub finds."""
        if self._hub is not None and not self._learned and (verdict := self._hub.verdict()):
            self._verdict = verdict
            self._send(verdict)
            self._learn(verdict)

    # ------------------------------------------------------------------------------------------- in its thread

    def _run(self, hub: tuple[str, int]) -> None:
        try:
            self._watch(hub)
        except BaseException as error:
            # Or its silence would be taken for that of the process.
            with self._lock, suppress(Exception):
                waiting.say(f"rank {self._own} is not watched any more ({type(error).__name__}: {error})")
                self._send({"unwatched": self._rank, "own": self._own})
            raise
        finally:
            with self._lock:
                for one in [*self._peers]:
                    self._drop(one)
            if self._listening is not None:
                held.discard(self._listening)
                self._listening.close()
            self._ready.close()

    def _watch(self, hub: tuple[str, int]) -> None:
        why = "no answer"
        if self._listening is None:
            try:
                connected = socket.create_connection(hub, _CONNECTS)
                connected.sendall(json.dumps({"nonce": self._nonce, "rank": self._rank}).encode() + b"\n")
                self._take(connected)
            except OSError as error:
                why = str(error)
        while not self._ended:
            if self._hub is None and not self._peers and not self._learned and self._hub_at is None:
                waiting.say(
                    f"rank {self._own} is not watched, as it cannot reach rank {self._log.ranks[0]} at {hub[0]}, port "
                    f"{hub[1]} ({why}): if a rank ends, others may wait for the time-out of the group. Let hosts "
                    "connect on any port, and initialise the group by an address that all of them reach, not by file://."
                )
                break
            for key, _ in self._ready.select(_TICK):
                with self._lock:
                    if key.fileobj is self._listening:
                        try:
                            self._take(self._listening.accept()[0])
                        except OSError:  # it has gone already, or this process has no descriptor left for it
                            time.sleep(_TICK)
                    elif isinstance(key.fileobj, socket.socket):
                        self._receive(key.fileobj)
            with self._lock:
                self._look(time.monotonic())
                for one, peer in [*self._peers.items()]:
                    if peer.rank is None and time.monotonic() - peer.since > _CONNECTS:
                        self._drop(one)

    def _take(self, connected: socket.socket) -> None:
        connected.settimeout(_SAYS)
        _keep_alive(connected, self._limit)
        held.add(connected)
        self._peers[connected] = Peer(connected)
        self._ready.register(connected, EVENT_READ)

    def _drop(self, connected: socket.socket) -> None:
        del self._peers[connected]
        self._ready.unregister(connected)
        held.discard(connected)
        connected.close()

    def _receive(self, connected: socket.socket) -> None:
        peer = self._peers[connected]
        try:
            for message in peer.receive():
                if peer.rank is None:
                    self._greet(peer, message)
                elif self._hub is not None:
                    self._hub.hear(peer.rank, message)
                else:
                    self._learn(message)
        except Exception:  # closed or reset; a stranger, who may send anything
            self._drop(connected)
            if peer.rank is not None and self._hub is not None:
                self._hub.lose(peer.rank)
            elif peer.rank is not None and self._hub_at is None:
                self._break(self._log.missing(0, "has stopped"))

    def _greet(self, peer: Peer, message: Message) -> None:
        """The first message of each side says the nonce, so that nobody else is listened to."""
        if message["nonce"] != self._nonce:
            raise ValueError("a stranger")
        peer.rank, self._heard = int(message["rank"]), time.monotonic()
        if self._hub is not None:
            # With what all others were told that had greeted before.
            for told in ({"nonce": self._nonce, "rank": 0}, *([self._verdict] if self._learned else [])):
                peer.connected.sendall(json.dumps(told).encode() + b"\n")
            self._hub.hear(peer.rank, {})  # a busy rank says nothing for up to 30 s
        else:
            self._send(self._state)

    def _learn(self, message: Message) -> None:
        """Takes what the hub says."""
        self._heard = time.monotonic()
        if "gone" in message:
            self._hub_at = tuple(message["at"])
        elif "unwatched" in message:
            self._ended = True
            waiting.say(f"rank {self._own} is not watched any more, as rank {message['own']} does not watch.")
        elif "failed" in message:
            if self._held is not None and self._held[1] != WITHIN_ZERO:  # one of torch, which does not hear of it
                waiting.say(f"rank {self._own}: {message['failed']}")
            self._break(message["failed"], by_another=message["by"] not in (None, self._rank))
        elif "asked" in message:
            self._asked = True
        elif "missing" in message:
            self._break(self._log.missing(message["missing"], message["how"]))
        # Else it is not there yet, or has gone on since.
        elif self._rank not in message.get("behind", [self._rank]) and tuple(message["at"]) == self._log.position:
            self._log.waits_for(message["behind"])

    def _break(self, reason: str, *, by_another: bool = True) -> None:
        if not self._learned:
            self._learned = True
            # In a thread, because transfers on the device are aborted there, which may take long. None starts once the
            # interpreter ends.
            with suppress(RuntimeError):
                broken = partial(self._log.failure.mark_broken, reason, by_another=by_another)
                Thread(target=broken, daemon=True).start()

    def _look(self, now: float) -> None:
        """Says where this rank is, if its log has not moved for a while, or moves again; and looks who is missing."""
        position = self._log.position
        if position != self._at:
            if self._told:
                self._say({"at": position, "log": None})
            self._at, self._since, self._told, self._held, self._asked = position, now, False, None, False
        elif not self._told and now - self._since >= self._stands:
            log = self._log.history[1]
            if self._log.position == position:  # it did not move while it was read
                self._told = True
                self._say({"at": position, "log": log})
        if self._told and self._asked and now - self._looked > _LOOKS:
            self._looked, held = now, standing()
            if held != self._held:
                self._held = held
                self._say({"held": held and held[1:]})
        if now - self._said > min(self._limit / 4, _BEAT):
            self._say({})
            if self._hub is not None:
                self._send({})
        self._tell()
        if self._hub_at is not None and self._hub_at < self._log.position:
            self._break(self._log.missing(0, "has ended before it reached this operation"))
        elif (
            self._hub is None
            and self._hub_at is None
            and any(peer.rank is not None for peer in self._peers.values())  # the hub has greeted
            and now - self._heard > self._limit
        ):
            self._break(self._log.missing(0, _SILENT.format(self._limit)))


class Peer:
    """A connection. rank: of the other side, once that has said the nonce. since: when the connection was made."""

    def __init__(self, connected: socket.socket) -> None:
        self.connected, self.since = connected, time.monotonic()
        self.rank: int | None = None
        self._begun = b""

    def receive(self) -> list[Message]:
        """Returns the messages that are complete. Does not wait: a rank may be stopped within a message."""
        data = self.connected.recv(1 << 16)
        *lines, self._begun = (self._begun + data).split(b"\n")
        if not data or len(self._begun) > _LONGEST:
            raise EOFError
        return [json.loads(line) for line in lines]


def _keep_alive(connection: socket.socket, seconds: float) -> None:
    """Has the system end a connection about so long after the other host stopped to answer, within an hour at most: it
    refuses times of many hours, as a group may have them."""
    seconds = min(seconds, 3600.0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Half of the time in silence, then four probes an eighth apart: together `seconds`.
    for name, value in {"TCP_KEEPIDLE": seconds / 2, "TCP_KEEPINTVL": seconds / 8, "TCP_KEEPCNT": 4}.items():
        if hasattr(socket, name):  # other systems have other names, and defaults of their own
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(1, round(value)))
