"""A model's parameters in the dtype that they are computed with, as stages 0 to 2 keep them whole."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from zero.plan.sizes import Sizes


@dataclass
class Kind:
    """What parameters of one kind have in common: the dtypes that are computed with and stepped, and being trained.

    numels: elements of each.
    """

    computed: torch.dtype
    stepped: torch.dtype
    trained: bool
    numels: list[int] = field(default_factory=list)

    @property
    def mastered(self) -> bool:
        """Whether masters are stepped, apart from the parameters."""
        return self.stepped is not self.computed

    @property
    def nbytes(self) -> int:
        return sum(self.numels) * self.computed.itemsize


class Kept:
    """Of all parameters, in the model's order; made once for all worlds.

    names: of each.
    params: each in the computed dtype; where that is not its own, flat, and one may stand for several of a size.
    kind_of: of each. kinds: all that there are.
    gradients: bytes of each one's whole gradient; 0 where it is frozen.
    """

    def __init__(self, sizes: Sizes, master_dtype: torch.dtype | None) -> None:
        computed_in = {name: group.dtype for group in sizes.groups for name in group.names}
        kinds: dict[tuple[torch.dtype, torch.dtype | None, bool], Kind] = {}
        casts: dict[tuple[int, torch.dtype, bool], nn.Parameter] = {}
        self.names = [*sizes.params]
        self.params: list[nn.Parameter] = []
        self.kind_of: list[Kind] = []
        self.gradients: list[int] = []
        for name, param in sizes.params.items():
            numel, dtypes = param.numel(), (param.dtype, computed_in[name], param.requires_grad)
            kind = kinds.get(dtypes)
            if kind is None:
                kind = kinds[dtypes] = _kind(*dtypes, master_dtype)
            kind.numels.append(numel)
            if kind.computed is not param.dtype:
                cast = (numel, kind.computed, kind.trained)
                if cast not in casts:
                    casts[cast] = _empty(*cast)
                param = casts[cast]
            self.params.append(param)
            self.kind_of.append(kind)
            self.gradients.append(numel * kind.computed.itemsize if kind.trained else 0)
        self.kinds = [*kinds.values()]

    @property
    def nbytes(self) -> int:
        return sum(kind.nbytes for kind in self.kinds)


def _kind(stored: torch.dtype, wanted: torch.dtype | None, trained: bool, master_dtype: torch.dtype | None) -> Kind:
    computed = wanted if wanted is not None and stored.is_floating_point else stored
    master = master_dtype or stored
    wider = computed.is_floating_point and master.itemsize > computed.itemsize
    return Kind(computed, master if wider else computed, trained)


def _empty(numel: int, dtype: torch.dtype, trained: bool) -> nn.Parameter:
    return nn.Parameter(torch.empty(numel, dtype=dtype, device="meta"), requires_grad=trained)
