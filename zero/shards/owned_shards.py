"""The shard groups of an optimizer's parameters, and the shard of each parameter that this rank steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from zero._torch.autograd import writes_so_far
from zero._torch.optimizers import without_optimizer_hooks
from zero.comm import Comm
from zero.measure.param_groups import options
from zero.shards import masters
from zero.shards.arguments import names
from zero.shards.cut import held, hold
from zero.shards.offload import DEVICE, Offload
from zero.shards.partition import Place, Shares, bucket_limit, lay_out, places_in
from zero.shards.placement import Placement
from zero.shards.shapes import with_own_storage
from zero.shards.shard_group import GroupOptions, ShardGroup, elsewhere, take_back

WRITTEN = (
    "a rank's own shard was written since the last step, through optimizer.part(param), and the other ranks compute "
    "with other weights. Write into the parameter itself, alike on every rank: with torch.no_grad(): param.add_(...). "
    "Between backward and step the shard may be written."
)


def rounded_groups(params: Iterable[Tensor]) -> list[ShardGroup]:
    """The groups of those of the parameters that are stored in fewer bits than their masters."""
    params = dict.fromkeys(params)
    holders = {id(one): one for param in params if (one := held(param).stepped_by()) is not None}
    return [flat for one in holders.values() for flat in one.rounded if not params.keys().isdisjoint(flat.params)]


def gather_masters(group: ShardGroup, to: int | None = None) -> dict[nn.Parameter, Tensor]:
    """Collective. The full values of a group's masters, as the next step uses them, on rank `to` of the group (None: on
    all); nothing elsewhere."""
    full = group.gather_full(masters.settled(group.main, group.shard), to)
    views = [] if full is None else group.shapes.views_of_full(full)
    return {param: with_own_storage(view) for param, view in zip(group.params if views else [], views, strict=True)}


class LoadsMasters(TorchFunctionMode):
    """A context in which what is copied into parameters that are stored rounded is copied into their masters, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        holder = held(args[0]).stepped_by() if func is Tensor.copy_ and len(args) > 1 else None
        if holder is not None and args[0] in holder.rounded_to and args[0].dtype is holder.rounded_to[args[0]]:
            master = holder[args[0]]
            param, value, *how = args
            value = value.detach().to(param.device, master.dtype)  # receives it, where another rank sends it
            holder.load_master(param, value)
            args = param, value, *how
        return func(*args, **(kwargs or {}))


class OwnedShards(dict[nn.Parameter, nn.Parameter]):
    """Maps each parameter to the shard that this rank steps: a view of its shard group, or of the group's stepped
    tensor (masters.py). A shard is empty if this rank owns nothing of the parameter.

    is_whole: whether a parameter stays with one rank. shares: what other optimizers of the model have given each rank.
    `shard_groups`: in the order in which backward is expected to reach them. `places`: each parameter's, in these.
    `given`: the parameters of each group, as they were laid out. `shares`: with these shards. `empty`: those that are.
    """

    def __init__(
        self,
        comm: Comm,
        *,
        is_whole: Callable[[nn.Parameter], bool],
        shares: Shares | None = None,
        master_dtype: torch.dtype | None,
        rounded: Mapping[nn.Parameter, torch.dtype] | None = None,
        offload: Offload = DEVICE,
    ) -> None:
        super().__init__()
        self.rounded_to = {} if rounded is None else rounded  # later ones are added to it
        self._comm, self._is_whole = comm, is_whole
        self._shares_before = shares or Shares(comm.world)
        self._master_dtype, self.offload = master_dtype, offload
        self._begin()

    def _begin(self) -> None:
        self.shares = self._shares_before.copy()
        self.given: list[list[nn.Parameter]] = []
        self.empty: set[nn.Parameter] = set()
        self._trained: set[ShardGroup] = set()
        self.shard_groups: list[ShardGroup] = []
        self.places: dict[nn.Parameter, Place] = {}
        # torch's counts of writes into what is stepped, at the end of the last step.
        self._versions: dict[ShardGroup, int] = {}

    def lay_out_again(self, param_groups: list[dict[str, Any]], numel: int) -> None:
        """Lays out the same parameters in shard groups of at most `numel` elements; their shards are other objects."""
        self.clear()
        self._begin()
        self.add(param_groups, numel)

    def add(self, param_groups: list[dict[str, Any]], numel: int | None = None) -> None:
        """Lays out the parameters of the groups, balanced with the shards that each rank owns.

        numel: the most elements of a shard group, which has at least one parameter. See `bucket_limit` for the default.
        """
        self.given += [[*group["params"]] for group in param_groups]
        # In reverse, the order of gradients: then a bucket of ShardedDDP gets its gradients one after another.
        params = [param for group in param_groups for param in group["params"]][::-1]
        names_of = [name for group in param_groups for name in names(group)][::-1]
        added: list[ShardGroup] = []
        division = self.shares.divide(params, {*filter(self._is_whole, params)})
        for dtype in dict.fromkeys(map(self.rounded_to.get, params)):
            alike = [index for index, param in enumerate(params) if self.rounded_to.get(param) is dtype]
            added += lay_out(
                [params[index] for index in alike],
                [names_of[index] for index in alike],
                Placement(self._comm),
                division,
                limit=bucket_limit(params, overlaps=any(map(self._comm.overlaps, params))) if numel is None else None,
                limit_numel=numel,
                options=GroupOptions(offload=self.offload),
            )
        self.shard_groups += added
        self.places.update(places_in(added))
        self.trained_groups()  # which are noted
        offloads = self.offload.of_groups([flat.layout.numel for flat in reversed(added)])
        for flat, offload in zip(added, reversed(offloads), strict=True):
            flat.offload = offload
            masters.make_main(flat, self._master_dtype, self.rounded_to.get(flat.params[0]))
            stepped = flat.shapes.views_of_shard(flat.main)
            for index, param in enumerate(flat.params):
                self[param] = nn.Parameter(stepped[index], requires_grad=param.requires_grad)
                # What a script writes on a parameter, now or later, such as a rate of its own, steps read on the shard.
                # Other classes of tensors keep there what they are, as does what stands for a tensor in a rehearsal.
                if issubclass(type(param), nn.Parameter):
                    self[param].__dict__ = param.__dict__
                if index not in flat.shapes.spans:
                    self.empty.add(self[param])
            # Weak: once the optimizer that took a parameter last is dropped, the one before it may step again.
            for param in flat.params:
                hold(param).stepped_by = ref(self)
        self.note_versions()

    def taken_by_another(self) -> str | None:
        """Returns the name of a parameter of which another optimizer's shards were made since, if there is one."""
        for param, place in self.places.items():
            if (holder := held(param).stepped_by()) is not None and holder is not self:
                return place.name
        return None

    def note_versions(self) -> None:
        """Counts what was written into the shards so far as known to all ranks."""
        self._versions = {flat: writes_so_far([flat.main]) for flat in self.shard_groups}

    def written_between_steps(self) -> ShardGroup | None:
        """Returns a group whose shard was written since the last step; torch counts that, except through `.data`."""
        return next((flat for flat, seen in self._versions.items() if writes_so_far([flat.main]) != seen), None)

    @property
    def masters(self) -> list[ShardGroup]:
        """The shard groups that have master weights."""
        return [flat for flat in self.shard_groups if flat.master is not None]

    @property
    def rounded(self) -> list[ShardGroup]:
        """The shard groups whose parameters are stored in fewer bits than the user gave them; masters have these."""
        return [flat for flat in self.masters if flat.params[0] in self.rounded_to]

    def load_master(self, param: nn.Parameter, value: Tensor) -> None:
        """Gives the master of a parameter into which a full value is loaded that value's elements."""
        group, index = self.places[param]
        if index in group.shapes.spans:
            known = writes_so_far([group.main]) == self._versions[group]  # else the next step refuses what was written
            self[param].copy_(group.own_slice(index, value.expand(param.shape)))
            group.offload.used(group.main)
            if known:
                self._versions[group] = writes_so_far([group.main])

    def refresh(self) -> None:
        """Copies what was written into parameters since the last step into the tensors that are stepped."""
        for flat in self.shard_groups:
            if flat.main is not flat.shard:
                masters.refresh(flat)

    def write_back(self) -> None:
        """Copies what is stepped into this rank's shards of the parameters, before they are gathered."""
        for flat in self.shard_groups:
            if flat.main is not flat.shard:
                masters.write(flat)
        self.note_versions()

    def trained_groups(self) -> list[ShardGroup]:
        """The shard groups that a step may have changed, in their order. Alike on all ranks, as gradients are."""
        # With those that were trained before: a parameter may have been frozen after its backward.
        for flat in self.shard_groups:
            # torch's optimizers ask for the gradient alone, which the user may have given to what requires none.
            if any(param.requires_grad or param.grad is not None for param in flat.params):
                self._trained.add(flat)
        return [flat for flat in self.shard_groups if flat in self._trained]

    def group(self, group: dict[str, Any]) -> dict[str, Any]:
        """A parameter group for the inner optimizer: this rank's shards, of which some may be empty."""
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        return {**options(group), **names, "params": [self[param] for param in group["params"]]}

    def place(self, param: nn.Parameter) -> Place:
        """Where a parameter lies. Raises KeyError for what is no parameter here."""
        found = self.places.get(param)
        if found is None:
            kind = "trained" if param.requires_grad else "frozen"
            raise KeyError(
                f"this optimizer was not given the {kind} parameter of shape {list(param.shape)} that it is asked for: "
                "it has those of its param_groups."
            )
        return found

    def cut_to_shard(self, param: nn.Parameter, value: Any) -> Any:
        """Returns this rank's elements of a tensor of the full shape of a parameter; anything else as it is."""
        group, index = self.places[param]
        return group.as_shard(index, value) if isinstance(value, Tensor) else value

    def rename(self, param_groups: list[dict[str, Any]], given: Mapping[nn.Parameter, str]) -> None:
        """Collective. Sets the names of parameters in error messages.

        Raises ValueError on every rank if the order of parameters differs between ranks. Without names, parameters of
        the same shape cannot be told apart.
        """
        for flat in self.shard_groups:
            flat.names = [given.get(param, name) for param, name in zip(flat.params, flat.names, strict=True)]
        in_order = [given.get(param, "") for group in param_groups for param in group["params"]]
        self._comm.compare("the parameters given to OSS", in_order)

    def step(self, optimizer: Optimizer, **options: Any) -> Any:
        """Steps these shards, all at once. Returns what the optimizer's step does."""
        for flat in self.shard_groups if self.offload.active else ():
            flat.wait_for_copies()
        with without_optimizer_hooks():  # those on the steps of all optimizers are called for the OSS
            return optimizer.step(**options)

    def take_back(self, optimizer: Optimizer) -> None:
        """Has shards that a step has given other data lie in their groups again, with that data."""
        for flat in self.shard_groups:
            shards = [self[param] for param in flat.params]
            take_back(shards, flat.shapes.views_of_shard(flat.main), [vars(optimizer)])

    def given_other_data(self) -> str | None:
        """Returns the name of a parameter whose shard lies elsewhere than in its group."""
        for flat in self.shard_groups:
            for index in elsewhere([self[param] for param in flat.params], flat.shapes.views_of_shard(flat.main)):
                return flat.names[index]
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after a step, also after one that failed."""
        if not self.offload.active:
            return
        for flat in self.shard_groups:
            flat.synchronize()
        self.offload.after_step(optimizer, [*self.values()])

    def step_group(self, optimizer: Optimizer, flat: ShardGroup, **how: Any) -> None:
        """Steps the shards of one group only. how: as of `Offload.step_group`."""
        flat.offload.step_group(flat, optimizer, [self[param] for param in flat.params], **how)
