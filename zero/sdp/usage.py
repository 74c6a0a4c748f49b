"""The end of a backward, where ranks compare their operations and exchange which parameters they have used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero.comm import Comm
from zero.sdp.bucket import GradBucket


class End:
    """The end of the backwards of one model. comms: the process groups to compare, one after another."""

    def __init__(self, comms: Sequence[Comm], name: str) -> None:
        self._groups = [(comm, comm.channel(name)) for comm in comms]

    def reach(self, buckets: Sequence[GradBucket]) -> None:
        """Collective. Raises RuntimeError on every rank unless all ranks have done the same operations.

        Passes on the gradients of parameters that only other ranks have used. For this, ranks exchange one byte for
        each trained parameter, but only if some rank has sent zeros.
        """
        missing = any(bucket.missing for bucket in buckets)
        for comm, channel in self._groups:
            missing = comm.agree(channel, flag=missing)
        used = self._used_anywhere(buckets) if missing else {}
        for bucket in buckets:
            bucket.decide(used.get(bucket, {}))

    def _used_anywhere(self, buckets: Sequence[GradBucket]) -> dict[GradBucket, dict[int, bool]]:
        """Collective. Returns whether any rank has used a parameter, by bucket and position."""
        used_here = [i in bucket.used for bucket in buckets for i in bucket.trained]
        anywhere = torch.tensor(used_here, dtype=torch.uint8, device="cpu")
        for comm, _ in self._groups:
            comm.all_reduce(anywhere, maximum=True)
        by_bucket = anywhere.bool().split([len(bucket.trained) for bucket in buckets])
        return {
            bucket: dict(zip(bucket.trained, used.tolist(), strict=True))
            for bucket, used in zip(buckets, by_bucket, strict=True)
        }
