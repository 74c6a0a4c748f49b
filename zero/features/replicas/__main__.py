"""`python -m zero.features.replicas` runs the coordinator."""

from __future__ import annotations

import argparse
import asyncio
import socket

import torch.distributed as dist

from zero.features.replicas.coordinator import Coordinator


async def serve(port: int, replicas: int, timeout: float) -> None:
    """Serves until no replica is left that has the training state. Prints the port; 0 takes a free one."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    coordinator = Coordinator(replicas, timeout, store.port)
    both = socket.has_dualstack_ipv6()  # one socket, as a free port of two would be two ports
    family = socket.AF_INET6 if both else socket.AF_INET
    listening = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
    server = await asyncio.start_server(coordinator.serve, sock=listening)
    print(f"port {listening.getsockname()[1]}", flush=True)
    async with server:
        await coordinator.over.wait()
        await asyncio.sleep(0.1)  # for what was written last


def main() -> None:
    """Takes the options of the command, which are those of `serve`."""
    parser = argparse.ArgumentParser("python -m zero.features.replicas", description="Runs the coordinator of replicas")
    parser.add_argument("--port", type=int, default=29400, help="that replicas connect to (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=1, help="that training begins with (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds that replicas wait for one another (default: %(default)s)"
    )
    given = parser.parse_args()
    asyncio.run(serve(given.port, given.replicas, given.timeout))


if __name__ == "__main__":
    main()
