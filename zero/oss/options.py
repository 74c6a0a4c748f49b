"""How an OSS shards: the user's options, checked and agreed between ranks before anything is changed, and the optimizer
that it shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero.comm import Comm
from zero.comm.together import alike
from zero.measure.built import refuse_arguments
from zero.measure.kinds import Finding, Kind, finding_of, known, narrow_among, title
from zero.measure.param_groups import alike_options, called, options, params_of, within
from zero.offload import NAMES as OFFLOAD
from zero.offload import take_offload
from zero.shards.arguments import (
    as_groups,
    describe,
    devices_of,
    named_params,
    parts_of,
)
from zero.shards.cut import refuse_sharded
from zero.shards.owned_shards import OwnedShards
from zero.shards.partition import (
    EvenOrWhole,
    Partition,
    Shares,
    cut_for,
    described,
    refuse_optimizer,
    refuse_partition,
    whole_among,
)
from zero.tensor_parallel import parts
from zero.wrap.precision import as_precision, rounds

if TYPE_CHECKING:
    from zero.wrap.precision import GivenPrecision

_GIVEN, _ADDED = "the parameters given to OSS", "the parameters added to OSS"


class Arguments:
    """Collective. The arguments are those of OSS. Raises ValueError on every rank if they cannot be used on any.

    `offload`: where shards are stored. `groups`: the parameters in torch's form.
    `finding`: what measuring found about the optimizer; None for torch's own.
    `writes_frozen`: whether the optimizer may write into parameters without gradients.
    """

    def __init__(
        self,
        comm: Comm,
        params: Iterable[Any],
        optim: Callable[..., Optimizer],
        defaults: dict[str, Any],
        *,
        partition: Partition,
        precision: GivenPrecision,
        rounded: Mapping[nn.Parameter, torch.dtype] | None,
        shares: Shares | None,
    ) -> None:
        self._comm, self._optim, self._defaults, self._shares = comm, optim, defaults, shares
        self._whole: set[nn.Parameter] = set()
        # Parameters that are stored in another dtype than their masters, with that dtype: all, unless the caller says
        # which.
        self._rounded, self._rounds_all = {**(rounded or {})}, rounded is None
        with alike([comm], _GIVEN) as lines:
            if not callable(optim):
                raise ValueError(
                    f"OSS was given a {type(optim).__name__} as its optimizer. Pass the class, and its arguments by "
                    "name: zero.OSS(params, torch.optim.AdamW, lr=1e-3); of one that is built OSS.from_optimizer."
                )
            own = ["partition", "precision", "rounded", "shares", "process_group", *OFFLOAD]
            refuse_arguments(optim, defaults.keys() - {*OFFLOAD}, own)
            self.groups = as_groups(params)
            refuse_sharded(named_params(self.groups))
            self._refuse_keyed(self.groups)
            refuse_partition(partition)
            policy = as_precision(precision)
            self._dtype, self.offload, self._asked = policy.param_dtype, take_offload(defaults), partition
            # That of master weights, if there are some.
            self._stepped_as = torch.float32 if self.offload.active or self._dtype is not None else None
            self._partition = partition
            comm.refuse_devices(devices_of(self.groups))
            found = self._look_at(self.groups)
            parts.refuse_unfit(named_params(self.groups), [comm])
            # As the optimizer needs it, also of parameters that are added later.
            self._partition = cut_for(partition, found)
            self.writes_frozen = found is not None and found.writes_frozen
            self.finding = None if known(optim) is not None else found
            lines += [
                f"optimizer {called(optim)}",
                f"partition {described(partition)}",
                f"{policy}, {self.offload.alike}",
                f"rounded {[*map(str, (rounded or {}).values())]}",
                f"defaults {alike_options(defaults)}",
                f"cut {self._note_whole(self.groups)}, as the optimizer was found to need it",
                f"parameters without gradients written by steps: {self.writes_frozen}",
                *describe(self.groups),
            ]
        self.groups = parts_of(self.groups)

    def added(self, param_group: dict[str, Any], seen: Mapping[nn.Parameter, Any]) -> dict[str, Any]:
        """Collective. Returns another group in torch's form. seen: the parameters so far."""
        with alike([self._comm], _ADDED) as lines:
            groups = as_groups([param_group], seen=set(seen))
            refuse_sharded(named_params(groups))
            self._refuse_keyed(groups)
            self._look_at(groups)
            parts.refuse_unfit(named_params(groups), [self._comm])
            lines += [f"cut {self._note_whole(groups)}", *describe(groups)]
        groups = parts_of(groups)
        self._note_rounded(groups)
        return groups[0]

    def _refuse_keyed(self, groups: list[dict[str, Any]]) -> None:
        """Raises ValueError for options that have parameters in them: the optimizer would look for these, and steps
        shards."""
        params = {param for _, param in named_params(groups)}
        bound, optim = dict(self._defaults), self._optim
        while isinstance(optim, partial):
            bound, optim = {**optim.keywords, **bound}, optim.func
        for name, value in [pair for given in (bound, *map(options, groups)) for pair in given.items()]:
            if any(isinstance(one, nn.Parameter) and one in params for one in within(value)):
                raise ValueError(
                    f"{called(optim)} was given parameters of the model in {name}, and OSS steps shards in place of "
                    "these. Write what it says of a parameter on the parameter itself, as `param.scale = 0.5`: its "
                    "shard has that, too. Or train at stage 3, where parameters stay themselves."
                )

    def _note_whole(self, groups: list[dict[str, Any]]) -> str:
        """Notes which of the groups' parameters stay whole, and returns what ranks compare of that."""
        whole = whole_among(self._partition, named_params(groups))
        self._whole.update(map(parts.of, whole))
        return f"but {[*whole.values()]}" if callable(self._partition) else self._partition

    def _look_at(self, groups: list[dict[str, Any]]) -> Finding | None:
        """Measures the optimizer with the groups' options. Raises ValueError if it cannot be sharded so."""
        if known(self._optim) is None and self._comm.world == 1:
            return None
        found = self._measured(groups)
        if not callable(self._partition):
            # "auto" has become "even" for the first groups: a later one that needs whole parameters would be cut, too.
            added_to_cut = self._partition == "even" and found.kind is Kind.TENSORWISE
            refuse_optimizer(title(self._optim), found, "even" if added_to_cut else self._asked)
            return found
        for group in groups:  # each by itself: an optimizer may treat some as Muon does, and others as AdamW
            of_group = [*named_params([group])]
            asked: EvenOrWhole = "whole" if len(whole_among(self._partition, of_group)) == len(of_group) else "even"
            refuse_optimizer(title(self._optim), self._measured([group]), asked)
        return found

    def _measured(self, groups: list[dict[str, Any]]) -> Finding:
        narrow = None if self._stepped_as is not None else narrow_among(param for _, param in named_params(groups))
        return finding_of(self._optim, self._defaults, [options(group) for group in groups], narrow)

    def lay_out(self, param_groups: list[dict[str, Any]]) -> OwnedShards:
        """Moves the parameters into shard groups. Collective with offload."""
        shards = OwnedShards(
            self._comm,
            is_whole=self._whole.__contains__,
            shares=self._shares,
            master_dtype=self._stepped_as,
            rounded=self._note_rounded(param_groups),
            offload=self.offload,
        )
        shards.add(param_groups)
        self.refuse_full()
        return shards

    def _note_rounded(self, groups: list[dict[str, Any]]) -> Mapping[nn.Parameter, torch.dtype]:
        """The parameters that are stored in another dtype than their masters from here on, with that dtype, in one
        mapping that those of later groups are added to."""
        dtype = self._dtype
        if self._rounds_all and dtype is not None:
            self._rounded.update({param: dtype for _, param in named_params(groups) if rounds(param, dtype)})
        return self._rounded

    def refuse_full(self) -> None:
        """Collective with offload. Raises ValueError on every rank if there is no room on any."""
        if self.offload.active:
            with alike([self._comm], what := "the shards of OSS"):
                self.offload.refuse_full(what)


def build_inner(
    comm: Comm,
    shards: OwnedShards,
    param_groups: list[dict[str, Any]],
    optim: Callable[..., Optimizer],
    defaults: dict[str, Any],
) -> Optimizer:
    """Collective. Returns the optimizer of the shards. Raises ValueError on every rank if it cannot be built on any.

    param_groups: of the user's parameters.
    """
    with alike([comm], "the optimizers that OSS shards") as lines:
        try:
            inner = optim([shards.group(group) for group in param_groups], **defaults)
            made = len(inner.param_groups)
        except Exception as error:
            raise ValueError(
                f"{called(optim)} could not be built from these parameters: {type(error).__name__}: {error}"
            ) from error
        if made != len(param_groups):
            raise ValueError(
                f"{called(optim)} made {made} groups of {len(param_groups)}, and OSS steps those that it was given. "
                "Build such an optimizer yourself, on zero.FSDP(model, partition='whole')."
            )
        if type(inner).zero_grad is not Optimizer.zero_grad:  # which is called on the OSS, for its parameters
            with torch.no_grad(), suppress(StopIteration):
                one = next(shard for shard in params_of(inner) if shard.numel() and shard.is_floating_point())
                one.grad = torch.ones_like(one)
                inner.zero_grad()
                left, one.grad = one.grad, None
                if left is not None and left.any():
                    raise ValueError(
                        f"zero_grad() of {called(optim)} leaves gradients, and that of OSS clears those of its "
                        "parameters. Do in the step what it does to them."
                    )
        lines.append(f"{type(inner).__name__}, {made} groups")
    return inner
