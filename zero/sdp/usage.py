"""The end of a backward, where ranks agree that all have come, and exchange which parameters they have used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero.comm import Comm
from zero.sdp.bucket import GradBucket


class End:
    """Of the backwards of one model. comms: the groups of ranks that own shards of it, one after another."""

    def __init__(self, comms: Sequence[Comm], name: str) -> None:
        self._groups = [(comm, comm.channel(name)) for comm in comms]

    def reach(self, buckets: Sequence[GradBucket]) -> None:
        """Collective. Raises RuntimeError on every rank unless all have come here by the same operations.

        Hands on what came of parameters that this rank has not used. Only where some rank has such parameters is more
        exchanged than that: one byte for each parameter.
        """
        missing = any(bucket.missing for bucket in buckets)
        for comm, channel in self._groups:
            missing = comm.agree(channel, flag=missing)
        used = self._used_anywhere(buckets) if missing else {}
        for bucket in buckets:
            bucket.decide(used.get(bucket, {}))

    def _used_anywhere(self, buckets: Sequence[GradBucket]) -> dict[GradBucket, dict[int, bool]]:
        """Collective. By bucket and index, whether any rank has used the parameter."""
        used_here = [i in bucket.used for bucket in buckets for i in bucket.trained]
        anywhere = torch.tensor(used_here, dtype=torch.uint8, device="cpu")
        for comm, _ in self._groups:
            comm.all_reduce(anywhere, maximum=True)
        by_bucket = anywhere.bool().split([len(bucket.trained) for bucket in buckets])
        return {
            bucket: dict(zip(bucket.trained, by_any.tolist(), strict=True))
            for bucket, by_any in zip(buckets, by_bucket, strict=True)
        }
