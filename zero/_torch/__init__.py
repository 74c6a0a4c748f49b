"""What differs between torch versions, and every name of torch's that is private. No other folder uses either.

Supported is torch 2.11 and what came after it; the suite is run with 2.11, 2.13 (on which `zero` is developed) and
`NEWEST_TESTED`. A private name may change with any version, so each is behind a function that says why no public one
serves. To try `zero` with a newer torch, look through this folder. Other folders import from here, not from its files.
"""

from functools import cache

import torch

from zero._torch.autograd import at_end_of_backward as at_end_of_backward
from zero._torch.autograd import base_of as base_of
from zero._torch.autograd import in_a_backward as in_a_backward
from zero._torch.autograd import keeping_versions as keeping_versions
from zero._torch.autograd import leaves_of_graphs as leaves_of_graphs
from zero._torch.autograd import shape_expected_by as shape_expected_by
from zero._torch.autograd import transformed as transformed
from zero._torch.autograd import writes_into as writes_into
from zero._torch.autograd import writes_so_far as writes_so_far
from zero._torch.compiling import call_around_compiling as call_around_compiling
from zero._torch.compiling import called_by_cuda_graphs as called_by_cuda_graphs
from zero._torch.compiling import compiled_to_cuda_graphs as compiled_to_cuda_graphs
from zero._torch.compiling import compiled_without_breaks as compiled_without_breaks
from zero._torch.compiling import is_compiled as is_compiled
from zero._torch.compiling import name_without_compile as name_without_compile
from zero._torch.compiling import named_as_compiled as named_as_compiled
from zero._torch.compiling import renamed as renamed
from zero._torch.compiling import uncompiled as uncompiled
from zero._torch.compiling import versions_in as versions_in
from zero._torch.compiling import versions_of as versions_of
from zero._torch.compiling import with_versions as with_versions
from zero._torch.modules import BATCH_NORM as BATCH_NORM
from zero._torch.modules import OwnHook as OwnHook
from zero._torch.modules import averaged_by as averaged_by
from zero._torch.modules import buffers_of as buffers_of
from zero._torch.modules import children_of as children_of
from zero._torch.modules import chosen_by_policy as chosen_by_policy
from zero._torch.modules import classes_to_ignore as classes_to_ignore
from zero._torch.modules import forward_hooks_of as forward_hooks_of
from zero._torch.modules import join_mark as join_mark
from zero._torch.modules import loads_by_itself as loads_by_itself
from zero._torch.modules import params_of as params_of
from zero._torch.modules import params_of_each as params_of_each
from zero._torch.modules import recomputed_in_backward as recomputed_in_backward
from zero._torch.modules import saved_of as saved_of
from zero._torch.modules import saves_by_itself as saves_by_itself
from zero._torch.modules import state_dict_hooks_of as state_dict_hooks_of
from zero._torch.optimizers import GradScaler as GradScaler
from zero._torch.optimizers import HooksOfSteps as HooksOfSteps
from zero._torch.optimizers import call_stepped as call_stepped
from zero._torch.optimizers import follow as follow
from zero._torch.optimizers import move_hooks as move_hooks
from zero._torch.optimizers import takes_state_hooks as takes_state_hooks
from zero._torch.optimizers import with_load_hooks as with_load_hooks
from zero._torch.optimizers import with_state_hooks as with_state_hooks
from zero._torch.optimizers import without_optimizer_hooks as without_optimizer_hooks
from zero._torch.pinned import PinnedMemory as PinnedMemory
from zero._torch.pinned import pinned as pinned
from zero._torch.pinned import pinned_for as pinned_for
from zero._torch.process_groups import abort as abort
from zero._torch.process_groups import another_like as another_like
from zero._torch.process_groups import backend_of as backend_of
from zero._torch.process_groups import coalesced as coalesced
from zero._torch.process_groups import collectives_of_one_tensor as collectives_of_one_tensor
from zero._torch.process_groups import gloo_group as gloo_group
from zero._torch.process_groups import host_of as host_of
from zero._torch.process_groups import in_stream_order as in_stream_order
from zero._torch.process_groups import nccl_version as nccl_version
from zero._torch.process_groups import shortest_timeout_of as shortest_timeout_of
from zero._torch.process_groups import store_of as store_of
from zero._torch.process_groups import timeout_of as timeout_of
from zero._torch.recording import CPU_ATTENTION as CPU_ATTENTION
from zero._torch.recording import CPU_ATTENTION_BACKWARD as CPU_ATTENTION_BACKWARD
from zero._torch.recording import DEVICE_OF as DEVICE_OF
from zero._torch.recording import VALUE_OF as VALUE_OF
from zero._torch.recording import DispatchMode as DispatchMode
from zero._torch.recording import profiler_range as profiler_range
from zero._torch.streams import current_stream_of as current_stream_of
from zero._torch.telling import warn_user as warn_user
from zero._torch.tensors import NEEDS_VALUES as NEEDS_VALUES
from zero._torch.tensors import Fake as Fake
from zero._torch.tensors import Rebound as Rebound
from zero._torch.tensors import WithoutMemory as WithoutMemory
from zero._torch.tensors import add_all as add_all
from zero._torch.tensors import as_plain_tensors as as_plain_tensors
from zero._torch.tensors import call_last as call_last
from zero._torch.tensors import copied_without_values as copied_without_values
from zero._torch.tensors import copy_all as copy_all
from zero._torch.tensors import flattened as flattened
from zero._torch.tensors import has_hooks as has_hooks
from zero._torch.tensors import has_values as has_values
from zero._torch.tensors import is_of_ddp as is_of_ddp
from zero._torch.tensors import is_of_two_devices as is_of_two_devices
from zero._torch.tensors import leaves as leaves
from zero._torch.tensors import let_move as let_move
from zero._torch.tensors import mapped as mapped
from zero._torch.tensors import multiply_all as multiply_all
from zero._torch.tensors import norms_of as norms_of
from zero._torch.tensors import with_local as with_local
from zero._torch.tensors import without_values as without_values
from zero._torch.tensors import wrap_others as wrap_others
from zero._torch.tensors import wrapped_in as wrapped_in
from zero._torch.tensors import wraps_others as wraps_others
from zero._torch.tensors import zero_all as zero_all

NEWEST_TESTED = (2, 15)


@cache
def warn_if_untested() -> None:
    """Warns, once a process, where the running torch is of a newer minor version than any that was tested."""
    minor = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if minor > NEWEST_TESTED:
        tested = ".".join(map(str, NEWEST_TESTED))
        warn_user(
            f"torch {torch.__version__} is newer than {tested}, the newest that this version of zero was tested with. "
            "Compare a few steps with DistributedDataParallel, and look for a newer zero."
        )
