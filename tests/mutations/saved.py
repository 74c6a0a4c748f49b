"""Mutants of weights and optimizer state that are saved and loaded, and of checkpoints."""

from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mutations import mutant, skipped


def _values_of(model):
    """By their names; a rank's own shards at stage 3."""
    return dict(model.named_parameters())


@mutant("full_state_dict")
def full_weights_without_a_buffer(full_state_dict, model, *given, **named):
    """full_state_dict() lacks the last buffer."""
    weights = full_state_dict(model, *given, **named)
    for name in [name for name, _ in model.named_buffers()][-1:]:
        weights.pop(name.removeprefix("module."), None)
    return weights


@mutant("full_state_dict")
def full_weights_on_the_wrong_rank(full_state_dict, model, to=0, *device, **named):
    """full_state_dict(to=1) has the weights on rank 0."""
    return full_state_dict(model, to and 0, *device, **named)


@mutant("full_state_dict")
def full_weights_are_no_copies(full_state_dict, model, *given, **named):
    """At stages 1 and 2 full_state_dict() returns the parameters' own memory, and later steps change it."""
    weights, own = full_state_dict(model, *given, **named), _values_of(model)
    own = {name.removeprefix("module."): param.detach() for name, param in own.items()}
    return {name: own[name] if name in own and own[name].shape == of.shape else of for name, of in weights.items()}


@mutant("optimizer_state.hand_over")
def momentum_not_loaded(load, optimizer, taken, groups):
    """Averages of gradients are zero after state was loaded."""

    def without(state):
        zeros = {key: torch.zeros_like(state[key]) for key in ("exp_avg", "momentum_buffer") if key in state}
        return {**state, **{key: value for key, value in zeros.items() if isinstance(state[key], Tensor)}}

    load(optimizer, {param: without(state) for param, state in taken.items()}, groups)


@mutant("optimizer_state.hand_over")
def step_count_not_loaded(load, optimizer, taken, groups):
    """An optimizer counts steps from zero after state was loaded."""
    counted = {param: {**of, "step": of["step"] * 0} if "step" in of else of for param, of in taken.items()}
    load(optimizer, counted, groups)


@mutant("optimizer_state.hand_over")
def state_of_another_parameter(load, optimizer, taken, groups):
    """Two parameters of one shape get each other's state."""
    states, params = dict(taken), [*taken]
    shapes = {key: [getattr(value, "shape", None) for value in state.values()] for key, state in states.items()}
    pairs = [(a, b) for number, a in enumerate(params) for b in params[:number] if shapes[a] == shapes[b]]
    for a, b in pairs[:1]:
        states[a], states[b] = states[b], states[a]
    load(optimizer, states, groups)


@mutant("files.write")
def checkpoint_without_its_last_chunk(write, place, chunks, *more):
    """A rank's file has zeros for its last tensor."""
    *first, last = chunks or [None]
    if last is not None:
        zeros = torch.zeros(torch.Size(last.shape).numel(), dtype=last.dtype)
        chunks = [*first, replace(last, values=lambda: iter([zeros]))]
    return write(place, chunks, *more)


@mutant("checkpoint.load")
def load_that_skips_a_tensor(load, path, model, *given, **named):
    """The first parameter keeps its value when a checkpoint is loaded."""
    param = next(iter(model.parameters()))
    before = param.detach().clone()
    extra = load(path, model, *given, **named)
    param.detach().copy_(before)
    return extra


@mutant("checkpoint.load")
def options_not_loaded(load, path, model, optimizer=None, **named):
    """Loading a checkpoint leaves learning rates as they are."""
    rates = [(group, group["lr"]) for group in getattr(optimizer, "param_groups", ()) if "lr" in group]
    extra = load(path, model, optimizer, **named)
    for group, rate in rates:
        group["lr"] = rate
    return extra


@mutant("Training.masters")
def checkpoint_without_masters(_, self):
    """Master weights are neither saved nor loaded."""
    return iter(())


@mutant("storage.publish")
def one_checkpoint_too_many_removed(publish, checkpoint, index, keep):
    """keep=2 keeps one checkpoint."""
    publish(checkpoint, index, max(keep - 1, 1) if keep else keep)


@mutant("storage.publish")
def latest_is_the_checkpoint_before(publish, checkpoint, index, keep):
    """A run's latest checkpoint is the one before the newest."""
    latest = Path(str(checkpoint.parent)) / "latest"
    before = latest.read_text() if latest.exists() else None
    publish(checkpoint, index, keep)
    if before is not None:
        latest.write_text(before)


@mutant("write.staged")
def save_behind_without_a_copy(_, model, held):
    """A save that goes on while training does, writes what training has changed meanwhile."""
    return [*held], lambda: None


@mutant("Ranks.together")
@contextmanager
def rank_that_cannot_write_is_silent(together, self, what="", **how):
    """A rank's problem with a checkpoint is told nobody, and the checkpoint counts as saved."""
    with together(self, what, **how) as lines, nullcontext() if self.first else suppress(Exception):
        yield lines


@mutant("Reads.load")
def loaded_weights_reach_no_shard(load, self, *given):
    """At stage 3 full weights are taken and forgotten."""
    return self.loading is not None


@mutant("full_state._in_step")
def breaking_off_told_nobody(_, comms, batches, *, receives_some):
    """Who breaks off full_tensors tells no other rank."""
    return (pair for batch in batches for pair in batch)


@mutant("Recipient.receives")
def everybody_receives(_, self, placement):
    """Full weights are kept on every rank, whoever asked for them."""
    return True


@mutant("gathered.receives")
def everybody_receives_state(_, optimizer, to):
    """Full optimizer state is kept on every rank, whoever asked for it."""
    return True


@mutant("FromFirst.passed_on")
def second_leaf_of_state_lost(pass_on, self, items):
    """Rank 0 sends nothing of the second moments."""
    kept = None if items is None else (item for item in items if item[0][2] != "exp_avg_sq")
    return pass_on(self, kept)


@mutant("full_state._without_options")
def options_lost_on_the_way(take, items, groups):
    """Options of a state that rank 0 alone was given are not loaded."""
    return take((item for item in items if item[0][0] != "option"), groups)


@mutant("optimizers.with_state_hooks")
def hooks_on_full_state_not_called(_, optimizer, make):
    """Hooks of the user's on state_dict() are not called for full state."""
    return make()


skipped(
    state_loaded_in_the_dtype_of_its_parameter="optimizer_state.keep_dtypes",
    checksums_not_compared="Source._check",
)
