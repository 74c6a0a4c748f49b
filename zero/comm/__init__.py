"""What ranks send to one another. No other folder calls torch.distributed's collectives.

Comm        one process group as the stages use it: gather, reduce, and checks that ranks do the same
Link        what all Comms of one process group share: the order of operations, a transport for each device type
Transport   one way of sending: host_memory, process_group (Gloo, and backends that overlap), local
"""

from zero.comm.comm import Comm
from zero.comm.handle import Handle
from zero.comm.quantised import Int8
from zero.comm.settings import configure
from zero.comm.traffic import Traffic, traffic

__all__ = ["Comm", "Handle", "Int8", "Traffic", "configure", "traffic"]
