"""What sharded parameters ask when somebody uses them outside of their own unit's forward.

The forward of another unit, a hook in backward and a checkpoint that computes again read the full parameter, and
torch.amp.GradScaler reads all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.autograd.graph import increment_version

from zero._torch import as_plain_tensors, in_a_backward
from zero.comm import Comm
from zero.comm.together import Together
from zero.fsdp.backward import Backward
from zero.fsdp.edges import recorded_as_shard
from zero.fsdp.shown import refuse_read
from zero.fsdp.unit import Index, Unit
from zero.shards.cut import Owner
from zero.shards.shard_group import ShardGroup


class Reads:
    """Reads of the parameters of one model, as sharded_parameter.py asks for them.

    scaled: the groups of ranks that have elements of the gradients.
    `loading`: while full weights are loaded (full_weights.py), what is called with each parameter and value.
    """

    def __init__(self, index: Index, comms: Sequence[Comm], backward: Backward, scaled: Sequence[Comm]) -> None:
        self._index, self._backward = index, backward
        self.loading: Callable[[nn.Parameter, Tensor], object] | None = None
        self._first_read = Together(comms, "the first reading of parameters of another unit")
        self._overflow = [(comm, comm.channel("the search for gradients that are not finite")) for comm in scaled]

    @property
    def _are_full(self) -> bool:
        """Whether parameters are full for who reads them now: within forward and backward."""
        return bool(self._index.running) or (in_a_backward() and self._backward.expected)

    def shape(self, param: nn.Parameter) -> Sequence[int] | None:
        """The full shape, if a parameter is read as full now or while full weights are loaded."""
        place = self._index[param]
        return place.group.full_shape(place.position) if self._are_full or self.loading is not None else None

    def load(self, owner: Owner, index: int, shard: Tensor, value: Tensor) -> bool:
        """While full weights are loaded, writes this rank's elements of a full value, and returns True."""
        if self.loading is None:
            return False
        assert isinstance(owner, ShardGroup)
        param, full_shape = owner.params[index], owner.full_shape(index)
        if value.shape != full_shape:
            raise RuntimeError(f"{owner.names[index]} has the shape {list(full_shape)}, not {list(value.shape)}")
        with as_plain_tensors():
            if index in owner.spans:
                shard.copy_(owner.own_slice(index, value.detach()))
            else:
                increment_version(param)  # so that graphs that saved it are refused on every rank
        self.loading(param, value)
        return True

    def unshard(self, param: nn.Parameter) -> bool:
        """Collective within a forward or backward: a parameter of another unit is read, which is unsharded with the
        innermost running one from now on. Returns False outside."""
        unit = self._index.unit_of(param)
        if not self._are_full:
            return False
        if not self._index.running:
            self._backward.unshard_to_read(unit)
            return True
        reader = self._index.running[-1]
        if not self._backward.active:
            refuse_read(unit)
        unit.unshard(for_backward=self._backward.active)
        unit.needed_by.add(reader)
        unit.read_by_others = True
        if unit not in self._index.reads[reader]:
            self._index.reads[reader].append(unit)
            self._refuse_recorded(unit, reader)
        return unit.readable

    def _refuse_recorded(self, unit: Unit, reader: Unit) -> None:
        """Collective. Raises RuntimeError on every rank for a Function of the user's that has recorded a shard."""
        with self._first_read:
            for name in filter(None, map(recorded_as_shard, unit.groups)):
                raise RuntimeError(
                    f"a torch.autograd.Function in the forward of {reader.title} of FSDP was given {name} of "
                    f"{unit.title} while it was sharded, and would get its gradient in the shape of the shard. From "
                    "the next forward on it is unsharded before. To train from the first on make both one unit, "
                    "FSDP(as_one_unit=...), or read the parameter once before the Function: param.detach()."
                )
            self._first_read.agree()

    def spread_overflow(self, found: Tensor) -> None:
        """Collective. Makes it the largest of any rank: 1 where a gradient is not finite.

        Loss scaling skips a step whose gradients are not finite (P. Micikevicius et al., Mixed Precision Training,
        2018, section 3.2). Only the owner of the overflowed elements sees them, and all ranks skip the same steps.
        """
        for comm, channel in self._overflow:
            comm.all_reduce(found, maximum=True, channel=channel)
