"""What differs between torch versions, and every name of torch's that is private. No other folder uses either.

Supported is torch 2.11 and what came after it; the suite is run with 2.11, 2.13 (on which `zero` is developed) and
`NEWEST_TESTED`. A private name may change with any version, so each is behind a function that says why no public one
serves. To try `zero` with a newer torch, look through this folder. Other folders import from here, not from its files.
"""

from zero._torch.autograd import at_end_of_backward, base_of, in_a_backward, keeps_graph, writes_into, writes_so_far
from zero._torch.compiling import (
    call_around_compiling,
    called_by_cuda_graphs,
    compiled_to_cuda_graphs,
    compiled_without_breaks,
    is_compiled,
    name_without_compile,
    named_as_compiled,
    uncompiled,
)
from zero._torch.fake import NEEDS_VALUES, has_values, is_of_two_devices, without_values
from zero._torch.joining import averaged_by, divides_by_ranks_with_data, join_mark, living_joins_of
from zero._torch.modules import (
    BATCH_NORM,
    buffers_of,
    children_of,
    chosen_by_policy,
    classes_to_ignore,
    recomputed_in_backward,
    state_dict_hooks_of,
)
from zero._torch.optimizers import (
    GradScaler,
    call_stepped,
    follow,
    takes_state_hooks,
    without_optimizer_hooks,
)
from zero._torch.process_groups import (
    abort,
    all_gather_of_one_tensor,
    all_to_all_of_one_tensor,
    another_like,
    backend_of,
    in_stream_order,
    reduce_scatter_of_one_tensor,
    store_of,
    timeout_of,
)
from zero._torch.recording import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    DEVICE_OF,
    VALUE_OF,
    DispatchMode,
    profiler_range,
)
from zero._torch.tensors import (
    add_all,
    copy_all,
    leaves,
    load_plain_values,
    multiply_all,
    norms_of,
    without_memory,
    wrap_others,
    wraps_others,
)
from zero._torch.versions import NEWEST_TESTED, warn_if_untested

__all__ = [
    "BATCH_NORM",
    "CPU_ATTENTION",
    "CPU_ATTENTION_BACKWARD",
    "DEVICE_OF",
    "DispatchMode",
    "GradScaler",
    "NEEDS_VALUES",
    "NEWEST_TESTED",
    "VALUE_OF",
    "abort",
    "add_all",
    "all_gather_of_one_tensor",
    "all_to_all_of_one_tensor",
    "another_like",
    "at_end_of_backward",
    "averaged_by",
    "backend_of",
    "base_of",
    "buffers_of",
    "call_around_compiling",
    "call_stepped",
    "called_by_cuda_graphs",
    "children_of",
    "chosen_by_policy",
    "classes_to_ignore",
    "compiled_to_cuda_graphs",
    "compiled_without_breaks",
    "copy_all",
    "divides_by_ranks_with_data",
    "follow",
    "has_values",
    "in_a_backward",
    "in_stream_order",
    "is_compiled",
    "is_of_two_devices",
    "join_mark",
    "keeps_graph",
    "leaves",
    "living_joins_of",
    "load_plain_values",
    "multiply_all",
    "name_without_compile",
    "named_as_compiled",
    "norms_of",
    "profiler_range",
    "recomputed_in_backward",
    "reduce_scatter_of_one_tensor",
    "state_dict_hooks_of",
    "store_of",
    "takes_state_hooks",
    "timeout_of",
    "uncompiled",
    "warn_if_untested",
    "without_memory",
    "without_optimizer_hooks",
    "without_values",
    "wrap_others",
    "wraps_others",
    "writes_into",
    "writes_so_far",
]
