"""The rendezvous of a process group's ranks: it finds out whether they share a host and may read one another's memory.

A rank reads notes from pipes that it has made, one for each other rank, which opens it through /proc: only a process
that may look into this one can send notes to it. Each rank exchanges a few hundred bytes through the group's store.
This is collective, but uses no process group.
"""

from __future__ import annotations

import ctypes
import json
import os
from contextlib import ExitStack, suppress

from zero.comm.forked import Pipe
from zero.comm.host_memory import attach
from zero.comm.host_memory.peers import Peer, Peers
from zero.comm.store import StoreRendezvous


def rendezvous(exchange: StoreRendezvous, how: str) -> Peers | None:
    """Collective. Returns this rank's peers; None, on every rank, unless all ranks run on one host and each may read
    the memory of all others. how: "auto", "off" or "ptracer"."""
    nonce = ctypes.create_string_buffer(exchange.nonce.encode())
    inboxes: dict[int, Pipe] = {}
    peers: dict[int, Peer] = {}
    with ExitStack() as opened, ExitStack() as entries:
        # What goes wrong on this rank, whatever it is, the others learn by an offer, or an answer, of no bytes.
        offer, answer = b"", b""
        with suppress(Exception):
            if how == "ptracer":
                attach.permit_siblings()
            pipes = {}
            for rank in {*range(exchange.world)} - {exchange.rank}:
                inbox, entry = os.pipe()
                inboxes[rank] = opened.enter_context(Pipe(inbox, "rb"))
                # Closed on leaving: a pipe whose other end this rank held open itself would never show a peer's end.
                pipes[rank] = entries.enter_context(Pipe(entry, "wb")).fileno()
            offer = json.dumps([attach.host(), os.getpid(), pipes, ctypes.addressof(nonce)]).encode()
        offers = exchange.all_gather(b"" if how == "off" else offer)
        if not all(offers):
            return None
        with suppress(Exception):
            for rank, (host, pid, pipes, address) in enumerate(map(json.loads, offers)):
                read = ctypes.create_string_buffer(len(nonce))
                if host == attach.host():
                    attach.read(pid, address, ctypes.addressof(read), len(nonce))
                if read.raw != nonce.raw:
                    raise OSError(f"rank {rank} of the group is on another host, or is not process {pid}")
                if rank != exchange.rank:
                    outbox = os.open(f"/proc/{pid}/fd/{pipes[str(exchange.rank)]}", os.O_WRONLY | os.O_NONBLOCK)
                    peers[rank] = Peer(pid, inboxes[rank], opened.enter_context(Pipe(outbox, "wb")))
            answer = b"connected"
        if not all(exchange.all_gather(answer)):
            return None
        return Peers(peers, exchange.timeout.total_seconds(), opened.pop_all().close)
