"""A transfer's kernel for benchmarks/wires.py --ctas: N programs, of 512 threads as NCCL has, which take their part of
the GPU's processors from the computing, and of its memory's bandwidth, for as long as the wire takes.

Each copies its part of what arrives, piece by piece, and spins until the wire would bring the next one. Unlike NCCL's
the programs do not wait for one another, and a processor has room for others beside one. Needs Triton.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

PIECE = tl.constexpr(8192)  # elements of float32
PIECES = tl.constexpr(2048)  # of either buffer, 64 MiB: more than the GPU's cache
NANOSECONDS = 1e9


@triton.jit(do_not_specialize=["pieces", "piece_ns"])
def copy_in_time(source, to, pieces, piece_ns):  # type: ignore[no-untyped-def]
    """pieces: of each program. piece_ns: nanoseconds from one to the next."""
    program, programs, lanes = tl.program_id(0), tl.num_programs(0), tl.arange(0, PIECE)
    due = globaltimer()
    for number in range(pieces):
        places = ((number * programs + program) % PIECES) * PIECE + lanes
        tl.store(to + places, tl.load(source + places))
        due += piece_ns
        now = globaltimer()
        while now < due:
            now = globaltimer()


class Copies:
    """Launches kernels that take so many seconds, of so many programs. bandwidth: GB/s of what arrives."""

    def __init__(self, programs: int, bandwidth: float, device: torch.device) -> None:
        self._programs, self._bytes_a_second = programs, 1e9 * bandwidth
        self._source, self._to = (torch.zeros(PIECES.value * PIECE.value, device=device) for _ in range(2))
        self(1e-6)  # compiles it

    def __call__(self, seconds: float) -> None:
        if seconds:
            pieces = max(1, round(seconds * self._bytes_a_second / (4 * PIECE.value * self._programs)))
            each = max(1, round(seconds * NANOSECONDS / pieces))
            copy_in_time[(self._programs,)](self._source, self._to, pieces, each, num_warps=16)
