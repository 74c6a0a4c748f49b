"""What plugs into the core: one folder a feature. Importing the package imports all of them."""

from zero.features import (  # noqa: F401 - they register themselves
    autocast,
    blocks,
    compile,
    host_memory,
    hybrid,
    meta,
    offload,
    reads,
    streams,
    tensor_parallel,
    watchdog,
    writes,
)
from zero.features.reads import at_rest  # noqa: F401
