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
from zero.measure.kinds import Finding, Kind, finding_of, known, narrow_among, title
from zero.measure.param_groups import called, described_options, options
from zero.offload import take_offload
from zero.shards.arguments import (
    as_groups,
    describe,
    devices_of,
    dtype_sent,
    master_problem,
    named_params,
    parts_of,
)
from zero.shards.claimed import sharded_problem
from zero.shards.offload import Offload
from zero.shards.owned_shards import OwnedShards
from zero.shards.partition import Partition, cut_for, optimizer_problem, partition_problem
from zero.tensor_parallel import parts

_GIVEN = "the parameters given to OSS"


@dataclass(frozen=True)
class Options:
    """How an OSS shards, stores and sends: the arguments of OSS, understood."""

    partition: Partition
    broadcast_fp16: bool | torch.dtype
    master_dtype: torch.dtype | None
    rounded: Mapping[nn.Parameter, torch.dtype] | None
    offload: Offload

    @property
    def sent_as(self) -> torch.dtype | None:
        """The dtype in which parameters are sent, if it is another one."""
        return dtype_sent(self.broadcast_fp16, "broadcast_fp16")[0]

    @property
    def stepped_as(self) -> torch.dtype | None:
        """The dtype of master weights, if there are some."""
        return torch.float32 if self.offload.active and self.master_dtype is None else self.master_dtype

    def signature(self) -> list[str]:
        """Returns what must be the same on every rank."""
        return [
            f"partition {self.partition}",
            f"broadcast_fp16 {self.broadcast_fp16}, master_dtype {self.master_dtype}, {self.offload.alike}",
            f"rounded {[*map(str, (self.rounded or {}).values())]}",
        ]

    def problem(self) -> str | None:
        """Returns an error message for a value that no OSS takes, else None."""
        return (
            partition_problem(self.partition)
            or dtype_sent(self.broadcast_fp16, "broadcast_fp16")[1]
            or master_problem(self.master_dtype)
        )


class Arguments:
    """Collective. The arguments are those of OSS. Raises ValueError on every rank if they cannot be used on any.

    `options`: the arguments, understood. `groups`: the parameters in torch's form.
    `cut`: how parameters are divided, as the optimizer needs it.
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
        with told_by_comparing(partial(comm.compare, _GIVEN, [])):
            self.groups, problem = as_groups(params)
            signature, problem = self._understand(given, problem)
        comm.compare(_GIVEN, signature, problem)
        self.groups = parts_of(self.groups)

    def _understand(self, given: dict[str, Any], problem: str | None) -> tuple[list[str], str | None]:
        """Returns what must be alike on all ranks, and an error message for what no OSS takes, or None. problem: of
        the groups."""
        comm, optim, defaults = self._comm, self._optim, self._defaults
        offload, wrong_offload = take_offload(defaults)
        self.options = Options(**given, offload=offload)
        problem = problem or sharded_problem(named_params(self.groups)) or self.options.problem() or wrong_offload
        found, unfit = (None, None) if problem else self._look_at(self.groups)
        self.cut = cut_for(self.options.partition, found)
        self.writes_frozen = found is not None and found.writes_frozen
        self.finding = None if known(optim) is not None else found
        signature = [
            f"optimizer {called(optim)}",
            *self.options.signature(),
            f"defaults {described_options(defaults)}",
            f"cut {self.cut}, as the optimizer was found to need it",
            f"parameters without gradients written by steps: {self.writes_frozen}",
        ]
        problem = problem or comm.device_problem(devices_of(self.groups)) or unfit
        problem = problem or parts.problem(named_params(self.groups), [comm])
        return [*signature, *describe(self.groups)], problem

    def added(self, param_group: dict[str, Any], seen: Mapping[nn.Parameter, Any]) -> dict[str, Any]:
        """Collective. Returns another group in torch's form. seen: the parameters so far."""
        groups, problem = as_groups([param_group], seen=set(seen))
        problem = problem or sharded_problem(named_params(groups)) or self._look_at(groups, cut=self.cut)[1]
        problem = problem or parts.problem(named_params(groups), [self._comm])
        self._comm.compare("the parameters added to OSS", describe(groups), problem)
        return parts_of(groups)[0]

    def _look_at(self, groups: list[dict[str, Any]], cut: str | None = None) -> tuple[Finding | None, str | None]:
        """Measures the optimizer with the groups' options; returns an error message if it cannot be sharded so.

        cut: how other groups are divided already.
        """
        found = known(self._optim)
        if found is None and self._comm.world > 1:
            of_groups = [options(group) for group in groups]
            stepped_apart = self.options.stepped_as is not None
            narrow = None if stepped_apart else narrow_among(param for _, param in named_params(groups))
            found = finding_of(self._optim, self._defaults, of_groups, narrow)
        if found is None:
            return None, None
        partition = "even" if cut == "even" and found.kind is Kind.TENSORWISE else self.options.partition
        return found, optimizer_problem(title(self._optim), found, partition)

    def lay_out(self, param_groups: list[dict[str, Any]]) -> OwnedShards:
        """Moves the parameters into shard groups. Collective with offload."""
        shards = OwnedShards(
            self._comm,
            cut=self.cut,
            master_dtype=self.options.stepped_as,
            rounded=self.options.rounded,
            offload=self.options.offload,
        )
        shards.add(param_groups)
        self.refuse_full()
        return shards

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
