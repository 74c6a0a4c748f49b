"""The gradients of this rank's shards, and what stands for them in `param.grad`.

Without ShardedDDP each rank has full gradients in `param.grad`, and a step takes its slices.

With ShardedDDP (stage 2) a gradient lives with its owners, and an OwnedGradient stands in `param.grad`. What stands
there is the truth, as it is with DistributedDataParallel:

    the parameter's own OwnedGradient    its shard counts in the next step and is added to by the next backward, also
                                         after it was taken away and put back: each keeps its own shard
    None                                 the gradient was dropped
    a plain tensor                       autograd has written a full gradient that is not reduced yet
    anything else                        is refused

It answers as the full gradient would: torch's own clipping, loss scaling and norms are right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from zero._torch.autograd import in_a_backward
from zero._torch.tensors import WithoutMemory, as_plain_tensors
from zero.comm import Comm
from zero.shards import norm
from zero.shards.cut import Cut
from zero.shards.owned_shards import OwnedShards
from zero.shards.shard_group import ShardGroup
from zero.shards.sharded_parameter import AtRest
from zero.wrap.bucket import FullBucket
from zero.wrap.refused import CREATE_GRAPH, refuse_sparse

# Operators that leave it as it is, and those that clear the shard.
_KEPT, _CLEARED = {"detach", "alias"}, {"zero_", "_foreach_zero_"}


class OwnedGradient(AtRest, WithoutMemory):
    """The gradient of one parameter, of which each rank has a shard; or what is computed of it element by element. It
    has no memory in its own shape, and answers as the full gradient (zero/shards/answers.py).

    `title`: the parameter's name. `cut`: which elements of it this rank has. `of`: what the optimizer steps of it,
    whose `grad` this one stands for; None of a copy on another device or in another dtype. `stands`: whether it does so
    now. `kept`: this rank's shard of it while it does not stand. `unreduced`: the full gradient of backwards since;
    None if there were none.
    """

    title: str
    cut: Cut
    of: Tensor | None
    stands: bool
    kept: Tensor | None
    unreduced: Tensor | None

    @staticmethod
    def __new__(cls, like: Tensor, title: str, cut: Cut, of: Tensor | None, **cast: Any) -> OwnedGradient:
        with as_plain_tensors():
            made = cls.like(like, **cast)
        made.title, made.cut, made.of = title, cut, of
        made.stands, made.kept, made.unreduced = False, None, None
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _CLEARED or (name == "to" and any(isinstance(one, torch.device) for one in args[1:])):
            with as_plain_tensors():
                return func(*args, **(kwargs or {}))
        if name == "__get__" and func == Tensor.dtype.__get__:  # type: ignore[attr-defined]
            return args[0].own().dtype  # that of the masters, where the parameter is narrower
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What torch itself does: accumulates, clears, moves and casts."""
        operator, first = func.overloadpacket.__name__, args[0]
        if operator in _KEPT:
            return first
        if operator == "_to_copy":  # the module is moved or cast: the step refuses that in its own words
            cast = {key: value for key, value in (kwargs or {}).items() if key in ("dtype", "device") and value}
            return cls(first, first.title, first.cut, None, **cast)
        if operator in _CLEARED:
            for one in first if isinstance(first, (list, tuple)) else [first]:
                one._clear() if isinstance(one, cls) else one.zero_()
            return first if operator == "zero_" else None
        if operator in ("add_", "add") and isinstance(first, cls) and in_a_backward():
            addend, alpha = args[1], (kwargs or {}).get("alpha", 1)
            return first._receive(addend if alpha == 1 else addend * alpha, in_place=operator == "add_")
        raise RuntimeError(
            f"{operator} was called by torch itself on the gradient of {args[0].title}, of which each rank has a shard "
            "at stage 2. Call torch's function on `param.grad`."
        )

    def _receive(self, gradient: Tensor, *, in_place: bool) -> OwnedGradient:
        """Takes what autograd adds, and does not write into it: others may hold it."""
        if not in_place:  # autograd adds so if the gradient is to have a graph
            raise RuntimeError(CREATE_GRAPH.format(self.title))
        self.unreduced = gradient if self.unreduced is None else self.unreduced + gradient
        return self

    def own(self) -> Tensor:
        if self.unreduced is not None:
            raise RuntimeError(
                f"the gradient of {self.title} was accumulated under no_sync(), and is not reduced yet. Read it after "
                "a backward outside of no_sync(), or call reduce()."
            )
        shard = self.of.grad if self.stands and self.of is not None else self.kept
        if shard is None:  # of which this rank owns nothing
            like: Any = self if self.of is None else self.of
            with as_plain_tensors():
                return torch.empty(0, *like.shape[1:], dtype=like.dtype, device=like.device)
        return shard

    def with_elements(self, own: Tensor) -> OwnedGradient:
        made = OwnedGradient(self, self.title, self.cut, self.of, dtype=own.dtype)
        made.kept = own
        return made

    def let_go(self) -> None:
        """`param.grad` is another one from now on. The user may have kept this one, and may put it back."""
        assert self.of is not None
        self.kept, self.of.grad, self.stands = self.of.grad, None, False

    def put_back(self) -> None:
        """It is `param.grad` again."""
        assert self.of is not None
        self.of.grad, self.kept, self.stands = self.kept, None, True

    def _clear(self) -> None:
        self.unreduced = None
        shard = self.of.grad if self.of is not None and self.stands else self.kept
        if shard is not None:
            shard.zero_()

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError(
            f"the gradient of {self.title} is spread over the ranks, and cannot be pickled. Save param.grad.clone() of "
            "stage 1, or gather it on every rank: param.grad.cpu().numpy()."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copy = self.with_elements(self.own().clone())
        return copy

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with as_plain_tensors():
            return f"OwnedGradient({self.title}, {list(self.shape)}, {self.dtype}, sharded by ShardedDDP)"


def refuse_left(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for a parameter with a gradient that an earlier ShardedDDP has left there."""
    for name, param in named:
        if isinstance(param.grad, OwnedGradient):
            raise ValueError(
                f"{name!r} has a gradient of a ShardedDDP that has the model already, as in a notebook whose cell runs "
                "again. Wrap what zero.unwrap(model) of that one returns, or clear the gradients first: "
                "module.zero_grad()."
            )


class OwnedGradients:
    """The gradients of the shards that one OSS steps.

    `are_sharded`: whether ShardedDDP sets them; otherwise steps take them from `param.grad`.
    """

    def __init__(self, shards: OwnedShards, comm: Comm) -> None:
        self.are_sharded = False
        self._shards, self._comm = shards, comm
        # By module: what brings full averages into `param.grad`.
        self._filled_by: WeakKeyDictionary[nn.Module, Sequence[FullBucket]] = WeakKeyDictionary()
        # Without ShardedDDP, by parameter: this rank's slice of an average that `param.grad` has rounded.
        self._averages: dict[nn.Parameter, Tensor] = {}
        # What stood in `param.grad` when it was looked at last.
        self._standing: dict[nn.Parameter, OwnedGradient] = {}

    def filled_by(self, buckets: Sequence[FullBucket], module: nn.Module) -> None:
        """These buckets bring full averages of the module's gradients from here on."""
        self._filled_by[module] = buckets

    def wait_for_copies(self) -> None:
        """Makes the host wait for gradients that are on their way to it."""
        for group in self._shards.shard_groups:
            if group.copies:
                group.wait_for_copies()

    # ----------------------------------------------------------------------------------------- with ShardedDDP

    def show(self, params: Iterable[tuple[nn.Parameter, str]]) -> None:
        """Puts the gradients that the shards of these parameters, given with their names, have now into `param.grad`,
        unless they stand there already.

        Always new ones: one that was taken away may be put back, with its own shard."""
        standing, shards = self._standing, self._shards
        for param, name in params:
            before = standing.get(param)
            if before is not None and param.grad is before:
                continue
            group, index = shards.places[param]
            made = OwnedGradient(param, name, Cut(ref(group), index), shards[param])
            if before is not None:  # cleared while the backward ran
                # Not `let_go`, which takes the gradient away from the shard: the new one stands for the same gradient.
                before.kept, before.stands = shards[param].grad, False
            made.stands, param.grad, standing[param] = True, made, made

    def follow(self, param: nn.Parameter, name: str) -> str | None:
        """Gives the shard of a parameter the gradient for which `param.grad` stands. Returns an error message for
        another parameter's, None otherwise."""
        held, before = param.grad, self._standing.get(param)
        if held is before:
            return None
        if isinstance(held, OwnedGradient) and held.of is not self._shards[param]:
            return f"{name} has the gradient of {held.title} in `param.grad`. {_OWN_ONLY}"
        if before is not None:
            self._standing.pop(param).let_go()
        if isinstance(held, OwnedGradient):
            held.put_back()
            self._standing[param] = held
        return None

    def cleared(self) -> None:
        """The user has cleared all gradients."""
        self.drop_cleared()
        for buckets in self._filled_by.values():
            for bucket in buckets:
                bucket.unreduced.clear()

    def drop_cleared(self) -> None:
        """Drops the gradients of shards whose parameters' gradients were cleared by `param.grad = None`."""
        for param in [param for param in self._standing if param.grad is None]:
            self._standing.pop(param).let_go()

    def take(self, param: nn.Parameter, name: str) -> Tensor | None:
        """Takes the full gradient that autograd has written, to be reduced into what `param.grad` stands for. None if
        there is none. Raises RuntimeError for another parameter's OwnedGradient."""
        problem, held = self.follow(param, name), param.grad
        if problem is not None:
            raise RuntimeError(problem)
        if isinstance(held, OwnedGradient):
            gradient, held.unreduced = held.unreduced, None
            return gradient
        param.grad = None
        return held

    def problem(self) -> str | None:
        """Gives all shards the gradients for which `param.grad` stands. Returns an error message for what stands for
        none, or for what nothing stands: a gradient that was not reduced, or assigned."""
        for bucket in (bucket for buckets in self._filled_by.values() for bucket in buckets):
            for index in bucket.unreduced:
                if bucket.params[index].grad is not None:
                    return (
                        f"{bucket.names[index]} has a gradient that was not averaged over the ranks: the "
                        "last backward ran under no_sync(), or failed. Run the last backward before step() outside "
                        "no_sync(), or call reduce(). To average gradients by hand build zero.OSS without zero.setup."
                    )
        if not self.are_sharded:
            return None
        for param, name in _named(self._shards.shard_groups):
            problem, held = self.follow(param, name), param.grad
            if problem is not None:
                return problem
            if held is None:
                if self._shards[param].grad is not None:
                    return f"the shard of {name} has a gradient that no backward has brought to its end. {_BY_HAND}"
            elif not isinstance(held, OwnedGradient) or held.unreduced is not None:
                return (
                    f"{name} has a gradient that was not reduced: the last backward ran under no_sync(), or went "
                    "around ShardedDDP, or the gradient was assigned. Run the last backward before step() outside "
                    f"no_sync(), or call reduce(). {_OWN_ONLY} {_BY_HAND}"
                )
        return None

    def abandon(self) -> None:
        """Drops what a backward that an exception ended has brought, and nothing stands for."""
        for param, shard in self._shards.items():
            if param not in self._standing:
                shard.grad = None

    def forget(self) -> None:
        """Drops all gradients: the parameters were laid out again."""
        for param, standing in self._standing.items():
            if param.grad is standing:
                param.grad = None
        self._standing.clear()

    # ------------------------------------------------------------------------------------------------- the step

    def collect(self) -> tuple[bool, str | None]:
        """Puts gradients where the inner optimizer finds them. Returns whether there are any (True if ShardedDDP sets
        them), and an error message for those that cannot be stepped. Raises RuntimeError for sparse ones."""
        problem = self.problem()
        if self.are_sharded or problem is not None:
            return True, problem
        shards = self._shards
        for shard in shards.values():
            shard.grad = None
        for group, index, share in self._shares():
            shards[group.params[index]].grad = group.to_main(share, for_step=True)
        self._averages.clear()
        # Full gradients, not the shards': a rank that owns nothing has none, and would warn that no gradient came.
        return any(param.grad is not None for param in shards), None

    def norm(self, norm_type: float) -> Tensor:
        """Collective. Returns the norm of all gradients, 0-dim."""
        self.refuse()
        shards = self._shards
        if self.are_sharded:
            owned = [(param, shard.grad) for param, shard in shards.items()]
        else:
            shares = {group.params[index]: share for group, index, share in self._shares()}
            # All parameters, also without a share here: ranks of tensor parallelism add up theirs together, or wait.
            owned = [(param, shares.get(param)) for param in shards]
        dtypes = {shard.dtype for shard in shards.values()}
        device = shards.shard_groups[0].full.device
        return norm.total_norm(owned, self._comm, norm_type, device, dtypes, shards.offload)

    def refuse(self) -> None:
        """Raises RuntimeError if `problem` finds one. The other ranks find the same, or wait for this one in vain."""
        problem = self.problem()
        if problem is not None:
            raise RuntimeError(problem)

    def clip(self, max_norm: float, total: Tensor) -> Tensor:
        """Scales all gradients, whose norm is `total`, to at most max_norm. Returns the norm before."""
        full = [param.grad for param in self._shards if param.grad is not None]
        held = self._shards.gradients() if self.are_sharded else [*full, *self._averages.values()]
        norm.clip(held, total, max_norm, offloaded=self._shards.offload.active)
        self._round_averages()
        return total

    # ------------------------------------------------------------------------------ averages that were rounded

    def keep_average(self, param: nn.Parameter, own: Tensor) -> None:
        """Keeps this rank's slice of a gradient that was averaged in a wider dtype than that of the parameter. It is
        stepped in place of the elements of `param.grad` that are it, rounded: not of those that the user has written.
        """
        self._averages[param] = own

    def scale_averages(self, factor: Tensor) -> None:
        """Scales what `keep_average` has kept; called where `param.grad` was scaled."""
        for average in self._averages.values():
            average.mul_(factor.to(average.device))
        self._round_averages()

    def _round_averages(self) -> None:
        """Puts them, rounded, into `param.grad`: what was rounded before it was scaled is another number."""
        for group, index, share in _shares(self._shards.shard_groups) if self._averages else ():
            average = self._averages.get(group.params[index])
            if average is not None:
                share.copy_(average)

    def _shares(self) -> Iterator[tuple[ShardGroup, int, Tensor]]:
        """As the function of this name, with averages in place of what was rounded."""
        for group, index, share in _shares(self._shards.shard_groups):
            average = self._averages.get(group.params[index])
            if average is not None:
                share = torch.where(average.to(share.dtype) == share, average, share.to(average.dtype))
            yield group, index, share


_OWN_ONLY = (
    "With ShardedDDP `param.grad` is None, or what backward has left there. To change a gradient write into "
    "optimizer.part(param).grad, or change it in a hook on the parameter."
)

_BY_HAND = "Gradients that no backward computes, as in evolution strategies, are for stage 1: OSS without ShardedDDP."


def _shares(groups: Sequence[ShardGroup]) -> Iterator[tuple[ShardGroup, int, Tensor]]:
    """Yields this rank's slices of the gradients of full parameters, with their groups and positions: views where
    their order in memory allows. Raises RuntimeError for a sparse gradient, whichever rank owns it, on all alike."""
    for param, name in _named(groups):
        if param.grad is not None and param.grad.is_sparse:
            refuse_sparse(name)
    for group in groups:
        for index in group.shapes.spans:
            full = group.params[index].grad
            if full is not None:
                yield group, index, group.own_slice(index, full)


def _named(groups: Sequence[ShardGroup]) -> Iterator[tuple[nn.Parameter, str]]:
    for group in groups:
        yield from zip(group.params, group.bound.names, strict=True)


def full_gradient(param: Tensor) -> Tensor | None:
    """Returns `param.grad` if it has values: None if the gradient lives with its owners."""
    return None if isinstance(param.grad, OwnedGradient) else param.grad
