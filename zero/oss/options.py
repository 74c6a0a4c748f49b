"""How an OSS shards: the user's options, checked and agreed between ranks before anything is changed, and the optimizer
that it shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero.comm import Comm
from zero.comm.together import told_by_comparing
from zero.measure.built import refuse_arguments
from zero.measure.kinds import Finding, Kind, finding_of, known, narrow_among, title
from zero.measure.param_groups import called, described_options, options
from zero.offload import NAMES as OFFLOAD
from zero.offload import take_offload
from zero.shards.arguments import (
    as_groups,
    describe,
    devices_of,
    named_params,
    parts_of,
)
from zero.shards.claimed import sharded_problem
from zero.shards.offload import Offload
from zero.shards.owned_shards import OwnedShards
from zero.shards.partition import (
    Cut,
    Partition,
    cut_for,
    described,
    optimizer_problem,
    partition_problem,
    whole_among,
)
from zero.shards.shares import Shares
from zero.tensor_parallel import parts
from zero.wrap.precision import MixedPrecision, as_precision, rounds

_GIVEN, _ADDED = "the parameters given to OSS", "the parameters added to OSS"


@dataclass(frozen=True)
class Options:
    """How an OSS shards, stores and sends: the arguments of OSS, understood."""

    partition: Partition
    precision: MixedPrecision
    rounded: Mapping[nn.Parameter, torch.dtype] | None
    shares: Shares | None
    offload: Offload

    @property
    def stepped_as(self) -> torch.dtype | None:
        """The dtype of master weights, if there are some."""
        return torch.float32 if self.offload.active or self.precision.param_dtype is not None else None

    def signature(self) -> list[str]:
        """Returns what must be the same on every rank."""
        return [
            f"partition {described(self.partition)}",
            f"{self.precision}, {self.offload.alike}",
            f"rounded {[*map(str, (self.rounded or {}).values())]}",
        ]

    def problem(self) -> str | None:
        """Returns an error message for a value that no OSS takes, else None."""
        return partition_problem(self.partition)


class Arguments:
    """Collective. The arguments are those of OSS. Raises ValueError on every rank if they cannot be used on any.

    `options`: the arguments, understood. `groups`: the parameters in torch's form.
    `finding`: what measuring found about the optimizer; None for torch's own.
    `writes_frozen`: whether the optimizer may write into parameters without gradients.
    """

    def __init__(
        self,
        comm: Comm,
        params: Iterable[Any],
        optim: Callable[..., Optimizer],
        defaults: dict[str, Any],
        **given: Any,
    ) -> None:
        self._comm, self._optim, self._defaults = comm, optim, defaults
        self._whole: set[nn.Parameter] = set()
        self._rounded: dict[nn.Parameter, torch.dtype] = {}
        with told_by_comparing(partial(comm.compare, _GIVEN, [])):
            if not callable(optim):
                raise ValueError(
                    f"OSS was given a {type(optim).__name__} as its optimizer. Pass the class, and its arguments by "
                    "name: zero.OSS(params, torch.optim.AdamW, lr=1e-3); of one that is built OSS.from_optimizer."
                )
            refuse_arguments(optim, defaults.keys() - {*OFFLOAD}, [*given, *OFFLOAD, "group"])
            self.groups, problem = as_groups(params)
            signature, problem = self._understand(given, problem)
        comm.compare(_GIVEN, signature, problem)
        self.groups = parts_of(self.groups)

    def _understand(self, given: dict[str, Any], problem: str | None) -> tuple[list[str], str | None]:
        """Returns what must be alike on all ranks, and an error message for what no OSS takes, or None. problem: of
        the groups."""
        comm, optim, defaults = self._comm, self._optim, self._defaults
        offload, wrong_offload = take_offload(defaults)
        given["precision"] = as_precision(given["precision"])
        self.options = Options(**given, offload=offload)
        self._rounded.update(self.options.rounded or {})
        self._partition = self.options.partition
        problem = problem or sharded_problem(named_params(self.groups)) or self.options.problem() or wrong_offload
        found, unfit = (None, None) if problem else self._look_at(self.groups)
        # As the optimizer needs it, also of parameters that are added later.
        self._partition = cut_for(self.options.partition, found)
        cut = "" if problem else self._note_whole(self.groups)
        self.writes_frozen = found is not None and found.writes_frozen
        self.finding = None if known(optim) is not None else found
        signature = [
            f"optimizer {called(optim)}",
            *self.options.signature(),
            f"defaults {described_options(defaults)}",
            f"cut {cut}, as the optimizer was found to need it",
            f"parameters without gradients written by steps: {self.writes_frozen}",
        ]
        problem = problem or comm.device_problem(devices_of(self.groups)) or unfit
        problem = problem or parts.problem(named_params(self.groups), [comm])
        return [*signature, *describe(self.groups)], problem

    def added(self, param_group: dict[str, Any], seen: Mapping[nn.Parameter, Any]) -> dict[str, Any]:
        """Collective. Returns another group in torch's form. seen: the parameters so far."""
        with told_by_comparing(partial(self._comm.compare, _ADDED, [])):
            groups, problem = as_groups([param_group], seen=set(seen))
            problem = problem or sharded_problem(named_params(groups)) or self._look_at(groups)[1]
            cut = "" if problem else self._note_whole(groups)
            problem = problem or parts.problem(named_params(groups), [self._comm])
        self._comm.compare(_ADDED, [f"cut {cut}", *describe(groups)], problem)
        groups = parts_of(groups)
        self._note_rounded(groups)
        return groups[0]

    def _note_whole(self, groups: list[dict[str, Any]]) -> str:
        """Notes which of the groups' parameters stay whole, and returns what ranks compare of that."""
        whole = whole_among(self._partition, named_params(groups))
        self._whole.update(map(parts.of, whole))
        return f"but {[*whole.values()]}" if callable(self._partition) else self._partition

    def _look_at(self, groups: list[dict[str, Any]]) -> tuple[Finding | None, str | None]:
        """Measures the optimizer with the groups' options; returns an error message if it cannot be sharded so."""
        if known(self._optim) is None and self._comm.world == 1:
            return None, None
        found = self._measured(groups)
        if not callable(self._partition):
            # "auto" has become "even" for the first groups: a later one that needs whole parameters would be cut, too.
            added_to_cut = self._partition == "even" and found.kind is Kind.TENSORWISE
            return found, optimizer_problem(
                title(self._optim), found, "even" if added_to_cut else self.options.partition
            )
        for group in groups:  # each by itself: an optimizer may treat some as Muon does, and others as AdamW
            of_group = [*named_params([group])]
            asked: Cut = "whole" if len(whole_among(self._partition, of_group)) == len(of_group) else "even"
            if problem := optimizer_problem(title(self._optim), self._measured([group]), asked):
                return found, problem
        return found, None

    def _measured(self, groups: list[dict[str, Any]]) -> Finding:
        stepped_apart = self.options.stepped_as is not None
        narrow = None if stepped_apart else narrow_among(param for _, param in named_params(groups))
        return finding_of(self._optim, self._defaults, [options(group) for group in groups], narrow)

    def lay_out(self, param_groups: list[dict[str, Any]]) -> OwnedShards:
        """Moves the parameters into shard groups. Collective with offload."""
        shards = OwnedShards(
            self._comm,
            is_whole=self._whole.__contains__,
            shares=self.options.shares,
            master_dtype=self.options.stepped_as,
            rounded=self._note_rounded(param_groups),
            offload=self.options.offload,
        )
        shards.add(param_groups)
        self.refuse_full()
        return shards

    def _note_rounded(self, groups: list[dict[str, Any]]) -> Mapping[nn.Parameter, torch.dtype]:
        """The parameters that are stored in another dtype than their masters from here on, with that dtype, in one
        mapping that those of later groups are added to."""
        dtype = self.options.precision.param_dtype
        if self.options.rounded is None and dtype is not None:
            self._rounded.update({param: dtype for _, param in named_params(groups) if rounds(param, dtype)})
        return self._rounded

    def refuse_full(self) -> None:
        """Collective with offload. Raises ValueError on every rank if there is no room on any."""
        offload = self.options.offload
        if offload.active:
            self._comm.compare("the shards of OSS", [], offload.problem("the shards of OSS"))


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
    inner, problem, made = None, None, 0
    try:
        inner = optim([shards.group(group) for group in param_groups], **defaults)
        made = len(inner.param_groups)
    except Exception as error:  # every rank must know of any error before it waits for this rank
        problem = f"{called(optim)} could not be built from these parameters: {type(error).__name__}: {error}"
    if problem is None and made != len(param_groups):
        problem = (
            f"{called(optim)} made {made} groups of {len(param_groups)}, and OSS steps those that it was given. Build "
            "such an optimizer yourself, on zero.FSDP(model, partition='whole')."
        )
    comm.compare("the optimizers that OSS shards", [f"{type(inner).__name__}, {made} groups"], problem)
    assert inner is not None
    return inner
