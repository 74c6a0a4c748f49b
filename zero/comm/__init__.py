"""Communication between ranks. No other folder calls torch.distributed's collectives.

Comm        the collectives of one process group: gather, reduce, and checks that all ranks do the same
Link        the state that all Comms of one process group share: the log of operations, a transport for each device type
Work        a transfer in flight: `wait` returns its result
Transport   what sends tensors: Gloo, backends that overlap with computing, or reads within a host
"""

from zero.comm.comm import Comm, Traffic, fail_together, traffic
from zero.comm.oplog import AGREEMENT, COLLECTION
from zero.comm.transport import Work

__all__ = ["AGREEMENT", "COLLECTION", "Comm", "Traffic", "Work", "fail_together", "traffic"]
