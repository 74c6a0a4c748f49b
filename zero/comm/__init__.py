"""Communication between ranks. No other folder calls torch.distributed's collectives.

Comm        the collectives of one process group: gather, reduce, and checks that all ranks do the same
Link        the state that all Comms of one process group share: the log of operations, a transport for each device type
Transport   the interface of host_memory, process_group (Gloo, and backends that overlap), local and rehearsal
"""

from zero.comm.comm import Comm
from zero.comm.handle import Handle
from zero.comm.order import COLLECTION
from zero.comm.quantised import Int8
from zero.comm.settings import configure
from zero.comm.traffic import Traffic, traffic

__all__ = ["COLLECTION", "Comm", "Handle", "Int8", "Traffic", "configure", "traffic"]
