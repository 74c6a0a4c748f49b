"""Stage 1: every rank keeps and steps a part of the optimizer's state.

A step, on every rank:
    take gradients      the part's share of each param.grad, as views (or what ShardedDDP has put there)
    step                the user's optimizer, over this rank's parts only
    gather              every rank's segment reaches every rank, in the flat buffers that the parameters lie in;
                        waited for in the step, or where the next forward needs them (ShardedDDP)

A part is a view of the parameter's own memory. With a master dtype it lies in a tensor of that dtype beside it, one a
flat group and of the length of this rank's segment, and the parameter is the rounded master.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, cast, overload

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zero.comm import Comm
from zero.oss import norm, state
from zero.oss.announce import announce
from zero.oss.ddp import replaced
from zero.oss.flat import FlatGroup
from zero.oss.from_optimizer import from_optimizer
from zero.oss.gradients import refuse_unreduced, take_gradients
from zero.oss.groups import as_groups, called, describe, devices_of, master_problem, options, sent_dtype, told_options
from zero.oss.joining import NO_JOIN, Joining
from zero.oss.kinds import ELEMENTWISE, Finding, Kind, finding_of, known, title
from zero.oss.named import build
from zero.oss.numbers import Agreed
from zero.oss.partition import Partition, cut_for, optimizer_problem, partition_problem
from zero.oss.parts import Parts
from zero.oss.scaling import Scaling
from zero.oss.sharded_optimizer import ShardedOptimizer
from zero.oss.slices import step_in_slices
from zero.oss.torch_checkpoint import asked_by_torch_checkpoint

_COMPRESSED_AT_ONCE = 2
"""Flat groups whose copies of fewer bits exist at a time."""


class OSS(ShardedOptimizer, Joinable):
    """Shards the state of an optimizer over the ranks of a process group (ZeRO stage 1; Rajbhandari et al.,
    "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.1).

        model = DistributedDataParallel(model)
        optimizer = OSS(model.parameters(), optim=torch.optim.Adam, lr=1e-3)

    Use it like the optimizer it wraps. The parameters are laid in flat buffers, and stay the objects they were.
    Gradients must be the same on all ranks when it steps: DistributedDataParallel, or ShardedDDP, sees to that.

    It holds the parameters, not the module. Parameters that were moved or cast are refused at the next step. Of those
    that the module has replaced (`load_state_dict(assign=True)`) it sees only that they get no gradients. Where none
    has one, it refuses the step, or without DistributedDataParallel warns at the second. Where some have, ShardedDDP
    refuses the backward; DistributedDataParallel refuses the next forward, unless it looks for unused parameters.

    params: as of any torch optimizer: parameters, (name, parameter) pairs, or dicts of groups with their own options.
        Names reach the optimizer as `param_names` of its groups, or as pairs if it takes no groups, as Adam-mini; the
        groups that it then makes are `param_groups`.
    optim: class of the optimizer to shard; `defaults` are its arguments.
    group: process group, by default all ranks. Without torch.distributed, this process alone.
    partition: "even" cuts inside parameters, so that all ranks own equally much; right for optimizers that treat each
        element by itself. "whole" keeps each parameter with one rank, for those that need whole matrices or norms.
        "auto" is what the optimizer was found to need: torch's own are known, others take a few steps of small tensors.
    granularity: elements; parameters are cut only at multiples of it from their start, for optimizers that treat
        elements in blocks, such as those that keep their state in 8 bits. With it "auto" is "even".
    broadcast_fp16: after a step send parameters as float16 (True) or as the dtype given, such as torch.bfloat16. The
        owner's own copy keeps its precision.
    master_dtype: torch.float32 keeps a master of this dtype of each part with its owner, for parameters of a lesser
        one, which are the rounded master (the 2Ψ + 2Ψ + 12Ψ/W bytes of the paper's section 3.1 under Adam).

    Where data ends earlier on some ranks than on others, train inside torch's `with Join([ddp, optimizer]):`. Each
    forward in it is followed by a backward and, but under no_sync, a step.

    Collective: the constructor, `add_param_group`, `step`, `clip_grad_norm`, `consolidate_state_dict`.
    Raises ValueError, on every rank, for parameters that cannot be sharded or that differ between ranks, and for
    optimizers that compute a step of one parameter from others, too.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optim: Callable[..., Optimizer] = torch.optim.SGD,
        group: torch.distributed.ProcessGroup | None = None,
        *,
        partition: Partition = "auto",
        granularity: int | None = None,
        broadcast_fp16: bool | torch.dtype = False,
        master_dtype: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        self._comm = Comm(group)
        groups, problem = as_groups(params)
        self._sent_as, wrong_dtype = sent_dtype(broadcast_fp16, "broadcast_fp16")
        problem = problem or partition_problem(partition, granularity) or wrong_dtype or master_problem(master_dtype)
        self._built, self._built_by = False, (optim, defaults)
        self._partition, self._granularity = partition, granularity
        found, unfit = (None, None) if problem else self._look_at(groups)
        self._cut = cut_for(partition, found, granularity)
        self._writes_frozen = found is not None and found.writes_frozen
        told = [
            f"optimizer {called(optim)}, partition {partition}, granularity {granularity}",
            f"broadcast_fp16 {broadcast_fp16}, master_dtype {master_dtype}",
            f"defaults {told_options(defaults)}",
            f"cut {self._cut}, as the optimizer was found to need it",
            f"numbers in param_groups written by steps: {found is not None and found.writes_numbers}",
            f"parameters without gradients written by steps: {self._writes_frozen}",
        ]
        problem = problem or self._comm.device_problem(devices_of(groups)) or unfit
        self._comm.compare("the parameters given to OSS", [*told, *describe(groups)], problem)
        self._agreed = Agreed(self._comm, expected=found.writes_numbers) if found and known(optim) is None else None
        self._master_dtype = master_dtype
        self.gradients_arrive_in_parts = False
        self._leaves_gathers = False
        self._steps_without_gradients = 0
        self._scaling = Scaling(self._comm, "clip_grad_norm(max_norm) of the optimizer")
        self._step_channel = self._comm.channel("the step of OSS")
        self._edited_channel = self._comm.channel("a step of OSS that it refuses, as its param_groups were edited")

        self._joining = Joining(self._comm)
        Joinable.__init__(self)
        super().__init__(groups)
        self._parts = self._laid_out()
        self.optim = self._build_inner(optim, defaults)
        self.defaults = dict(self.optim.defaults)
        self._share_options(self.optim.param_groups, self.param_groups)
        self._built = True
        announce(f"OSS({called(optim)})", self._comm, self.flat_groups, sharded="optimizer state")

    # -------------------------------------------------------------------------------------- construction

    @classmethod
    def from_optimizer(
        cls, optimizer: Optimizer, group: torch.distributed.ProcessGroup | None = None, **options: Any
    ) -> OSS:
        """Collective. An OSS in the place of an optimizer that was built of full parameters; see
        zero.oss.from_optimizer."""
        return from_optimizer(cls, optimizer, group, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Collective. Shards the group's parameters too, balanced with what each rank owns already."""
        if not self._built:
            super().add_param_group(param_group)
            return
        groups, problem = as_groups([param_group], seen=set(self._parts))
        problem = problem or self._look_at(groups)[1]
        self._comm.compare("the parameters added to OSS", describe(groups), problem)
        super().add_param_group(groups[0])
        added = self.param_groups[-1]
        self._parts.add([added])
        given = self._parts.group(added)
        if "param_names" not in self.optim.param_groups[0]:
            given.pop("param_names", None)  # torch refuses groups of which only some have names
        self.optim.add_param_group(given)
        # Not of the other groups: a scheduler may have written into them since the last step.
        self._share_options(self.optim.param_groups[-1:], [added])
        self.forget_full_state()

    def _look_at(self, groups: list[dict[str, Any]]) -> tuple[Finding | None, str | None]:
        """What the optimizer is with groups of such options, and what keeps it from being sharded as it is to be."""
        optim, defaults = self._built_by
        found = known(optim)
        if found is None and self._comm.world > 1:
            found = finding_of(optim, defaults, [options(group) for group in groups], self._granularity)
        if found is None:
            return None, None
        name = title(optim)
        if self._built and found.kind is Kind.TENSORWISE and self._cut == "even":
            return found, optimizer_problem(name, found, "even", self._granularity)
        return found, optimizer_problem(name, found, self._partition, self._granularity)

    def _build_inner(self, optim: Callable[..., Optimizer], defaults: dict[str, Any]) -> Optimizer:
        inner, by_name, problem = None, False, None
        groups, named = [self._parts.group(group) for group in self.param_groups], self._parts.named(self.param_groups)
        try:
            inner, by_name = build(optim, groups, named, defaults)
        except Exception as error:  # whatever it is, every rank must hear of it before it waits for this one
            problem = f"{called(optim)} could not be built from these parameters: {type(error).__name__}: {error}"
        made = len(inner.param_groups) if inner is not None else 0
        self._comm.compare("the optimizers that OSS shards", [f"{type(inner).__name__}, {made} groups"], problem)
        assert inner is not None
        if by_name:
            self._parts.regroup(inner, self.param_groups)
        for name in ("train", "eval"):  # by which optimizers such as Schedule-Free switch between two sets of weights
            if callable(getattr(inner, name, None)):
                vars(inner)[name] = self._followed_by_gather(getattr(inner, name))
        return inner

    def _followed_by_gather(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the inner optimizer that writes into parts; collective from here on."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._refuse_changes()
            result = method(*args, **kwargs)
            self._share_options(self.optim.param_groups, self.param_groups)
            self._gather(self.flat_groups)
            self.finish_gathers()
            return result

        return call

    def __getattr__(self, name: str) -> Any:
        """What this optimizer lacks and the inner one has: values, and `train` and `eval`, which are collective."""
        inner = self.__dict__.get("optim")
        value = None if inner is None or name.startswith("_") else getattr(inner, name, None)
        if value is None or (callable(value) and name not in ("train", "eval")):
            told = f"'{type(self).__name__}' object has no attribute '{name}'"
            if value is not None:
                told += f". {type(inner).__name__}'s sees this rank's parts alone: call it on `.optim` if that will do"
            raise AttributeError(told, name=name, obj=self)
        return value

    def _laid_out(self, numel: int | None = None) -> Parts:
        parts = Parts(self._comm, cut=self._cut, granularity=self._granularity, master_dtype=self._master_dtype)
        parts.add(self.param_groups, numel)
        return parts

    def set_bucket_size(self, numel: int) -> None:
        """Collective. Lays the parameters out anew in flat groups of at most so many elements, one parameter at least.

        The optimizer's state comes along; gradients are cleared. Raises RuntimeError where param_groups were edited.
        """
        self.finish_gathers()
        self._refuse_edits()
        # Some ranks may own nothing that has state.
        some_state = any(self._comm.all_gather_text("some" if self.optim.state else ""))
        whole = state.consolidate(self, None, settle=False) if some_state or self.keeps_masters else None
        self._parts = self._laid_out(numel)
        self.optim.state.clear()
        for inner, outer in zip(self.optim.param_groups, self.param_groups, strict=True):
            inner["params"] = self._parts.group(outer)["params"]
        if whole is not None:
            state.load(self, whole)

    # ------------------------------------------------------------------------------------ what others need

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the largest flat group: what a transfer takes at a time."""
        return max(flat.full.nbytes for flat in self.flat_groups)

    def expect_gradients_in_parts(self) -> None:
        """From now on gradients are put into the parts (by ShardedDDP), not taken from `param.grad`."""
        self.gradients_arrive_in_parts = True

    def leave_gathers(self) -> None:
        """From now on `step` leaves its gathers in flight, where transfers run beside the computing (so not over Gloo).

        Until they are finished the parameters are NaN.
        """
        self._leaves_gathers = True

    def finish_gathers(self, flats: Sequence[FlatGroup] | None = None) -> None:
        """Waits for what a step left in flight, of these flat groups or of all; does nothing where nothing is.

        Raises RuntimeError where parameters were moved or replaced since the step.
        """
        gathering = [flat for flat in self.flat_groups if flat.gathering and (flats is None or flat in flats)]
        self._refuse_strays(gathering)
        for flat in gathering:
            flat.finish_gather()

    def rename(self, given: dict[nn.Parameter, str]) -> None:
        """Collective. Gives the parameters the names that errors call them by.

        Raises ValueError, on every rank, where they come in another order on another rank: without names those of one
        shape look the same.
        """
        for flat in self.flat_groups:
            flat.names = [given.get(param, name) for param, name in zip(flat.params, flat.names, strict=True)]
        in_order = [given.get(param, "") for group in self.param_groups for param in group["params"]]
        self._comm.compare("the parameters given to OSS", in_order)

    # -------------------------------------------------------------------------------------------- stepping

    @overload
    def step(self, closure: None = None, **options: Any) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], **options: Any) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> float | None:
        """Collective. Steps this rank's parts and gathers everyone's. Returns the closure's loss.

        options: further arguments, for the inner optimizer's step. That of torch's own optimizers is given no closure:
        it is called before. Others are given it, and each time they call it parameters are gathered before.

        Raises RuntimeError where parameters were moved or replaced, where gradients were left unreduced by no_sync, and
        on every rank where param_groups were edited on one, where the optimizer wrote other numbers into its own on
        another, where another rank does something else, or inside of `ddp.join()`.
        """
        by_inner = closure is not None and type(self.optim) not in ELEMENTWISE
        if by_inner and self._joining.within(self):
            raise RuntimeError(
                f"{type(self.optim).__name__} may call its closure several times in a step, which ranks that have no "
                "data left in this Join cannot follow. Call step() without a closure, after backward."
            )
        self._joining.before_step(self, self._parts)
        loss: Any = None
        if closure is not None and by_inner:
            self._refuse_changes()
            self._hand_options()
            loss = self.optim.step(closure=self._for_inner(closure), **options)
        else:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._begin_step()
            step_in_slices(self.optim, **options)
        self._end_step()
        return cast("float | None", loss)

    def _begin_step(self, *, joined: bool = False) -> None:
        """Collective. All that comes between the gradients and the inner optimizer's step.

        joined: this rank has no data left, and steps with the gradients of others.
        """
        self._refuse_changes()
        if not joined:
            self._refuse_replaced(self._take_gradients())
        if self._joining.within(self):
            self._joining.share_gradients(self._parts, self.param_groups, joined=joined)
        self._parts.masters.refresh()
        self._hand_options()

    def _hand_options(self) -> None:
        """To the inner optimizer, which may write numbers into its groups from here on."""
        self._share_options(self.param_groups, self.optim.param_groups)
        if self._agreed is not None:
            self._agreed.before_step(self.optim)

    def _end_step(self) -> None:
        """Collective. All that comes after the inner optimizer's step."""
        if self._agreed is not None:
            self._agreed.after_step(self.optim)
        self._leave_gradients()
        self._share_options(self.optim.param_groups, self.param_groups)
        self.forget_full_state()
        self._gather(self._stepped_groups())

    def _stepped_groups(self) -> list[FlatGroup]:
        """The flat groups that a step may have changed, in the order in which forward needs them."""
        return self.flat_groups[::-1] if self._writes_frozen else self._parts.trained_groups()

    def _refuse_changes(self) -> None:
        self.finish_gathers()
        self._refuse_strays(self.flat_groups)
        self._refuse_edits()

    def _for_inner(self, closure: Callable[[], float]) -> Callable[[], float]:
        """The closure for an optimizer that calls it within its step, as often as it likes."""
        called = False

        def evaluate() -> float:
            nonlocal called
            if called:  # the optimizer may have changed its parts since
                self._gather(self._stepped_groups())
                self.finish_gathers()
            called = True
            with torch.enable_grad():
                loss = closure()
            self._refuse_changes()
            self._refuse_replaced(self._take_gradients())
            self._parts.masters.refresh()
            return loss

        return evaluate

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """As of any optimizer. With ShardedDDP, which leaves no gradients in `param.grad`, the hook is called with the
        inner optimizer, whose `param_groups` hold this rank's parts with their gradients.

        Raises RuntimeError on every rank, at the step, where a hook scaled gradients differently on different ranks.
        """

        def with_gradients(_: Optimizer, args: Any, kwargs: Any) -> Any:
            if not self.gradients_arrive_in_parts:
                return hook(self, args, kwargs)
            self._scaling.remember(self._parts.values())
            result = hook(self.optim, args, kwargs)
            self._scaling.compare(None)
            return result

        return super().register_step_pre_hook(with_gradients)

    def _gather(self, flats: Sequence[FlatGroup]) -> None:
        """Collective. Brings every rank's parts, as they are now, to every rank."""
        self._parts.masters.write()
        self._comm.agree(self._step_channel)
        in_flight: list[FlatGroup] = []
        for flat in flats:
            if self._sent_as is not None and len(in_flight) == _COMPRESSED_AT_ONCE:
                in_flight.pop(0).finish_gather()
            flat.launch_gather(agreed=True, sent_as=self._sent_as, conceal=self._is_left(flat))
            in_flight.append(flat)
        for flat in in_flight:
            if not self._is_left(flat):
                flat.finish_gather()

    def _is_left(self, flat: FlatGroup) -> bool:
        return self._leaves_gathers and self._comm.runs_beside(flat.full)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters and of this rank's parts."""
        super().zero_grad(set_to_none)
        self.optim.zero_grad(set_to_none)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Collective. Scales all gradients so that their norm, as one vector, is at most max_norm.

        Returns the norm before, 0-dim, the same on every rank. norm_type: 1, 2, any p > 0, or inf.
        """
        self._take_gradients()
        owned = self._parts.gradients()
        device = self.flat_groups[0].full.device
        dtypes = {part.dtype for part in self._parts.values()}
        whole = [param.grad for param in self._parts if param.grad is not None]
        if self._joining.within(self):  # ranks that have joined are not here
            total = norm.total_norm(whole, Comm.alone(), float(norm_type), device, dtypes)
        else:
            total = norm.total_norm(owned, self._comm, float(norm_type), device, dtypes)
        norm.clip(owned if self.gradients_arrive_in_parts else whole, total, float(max_norm))
        self._leave_gradients()
        return total

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's Join, which calls it on every rank. Raises RuntimeError at stage 2."""
        if self.gradients_arrive_in_parts:
            raise RuntimeError(NO_JOIN.format("an OSS of ShardedDDP"))
        return self._joining.enter(self._step_joined, self._parts)

    @torch.no_grad()
    def _step_joined(self) -> None:
        self._begin_step(joined=True)
        step_in_slices(self.optim)
        self._end_step()

    @property
    def join_device(self) -> torch.device:
        return self.flat_groups[0].full.device

    @property
    def join_process_group(self) -> torch.distributed.ProcessGroup | None:
        return self._comm.group

    def _take_gradients(self) -> bool:
        """Returns whether any parameter has a gradient; of gradients that arrive in parts, True."""
        if self.gradients_arrive_in_parts and not asked_by_torch_checkpoint():  # which steps with zeros of its own
            refuse_unreduced(self.flat_groups)
            return True
        return take_gradients(self.flat_groups, self._parts)

    def _refuse_replaced(self, found_gradients: bool) -> None:
        """That there are none may be as it should be: a first step for a scheduler, a skipped batch."""
        self._steps_without_gradients = 0 if found_gradients else self._steps_without_gradients + 1
        if found_gradients:
            return
        told = (
            "OSS found no gradient. If backward was called, the model has other parameters than OSS: load weights with "
            "assign=False, and build OSS after replacing any."
        )
        if replaced(self._parts):
            raise RuntimeError(told)
        if self._steps_without_gradients == 2:
            warnings.warn(f"In two steps one after another {told}", stacklevel=5)

    def _leave_gradients(self) -> None:
        """What was taken is taken anew each time. Views would keep whole gradients alive past model.zero_grad()."""
        if not self.gradients_arrive_in_parts:
            self._parts.drop_gradients()

    def _refuse_edits(self) -> None:
        problem = self._parts.edited(self.param_groups)
        if problem is not None:
            with suppress(RuntimeError):
                self._comm.agree(self._edited_channel)  # so that ranks with nothing to refuse hear of it
            raise RuntimeError(problem)

    def _refuse_strays(self, flats: Sequence[FlatGroup]) -> None:
        for flat in flats:
            stray = flat.reclaim()
            if stray is not None:
                raise RuntimeError(
                    f"{stray} was moved, cast or given other data after OSS was built, and would no longer be trained. "
                    "Move and cast the model first, then build OSS; load weights with load_state_dict (assign=False)."
                )

    def _share_options(self, source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
        """Schedulers write into the outer groups, some optimizers into the inner ones: both see the same options."""
        for of, to in zip(source, target, strict=True):
            to.update(options(of))
