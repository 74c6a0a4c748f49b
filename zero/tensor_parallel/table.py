"""Which plain parameter stands for which DTensor.

A plain parameter keeps its DTensor, which keeps no memory once the plain one is in the module; the DTensor does not
keep the plain one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zero._torch.tensors import wraps_others
from zero.comm import Comm

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# By plain parameter.
_dtensors: WeakIdKeyDictionary = WeakIdKeyDictionary()
# By DTensor, the user's own or one that is shown: a weak reference to the plain parameter.
_plain: WeakIdKeyDictionary = WeakIdKeyDictionary()
# By DeviceMesh: its ranks. Equal meshes may have other process groups.
_comms: WeakIdKeyDictionary = WeakIdKeyDictionary()
made = 0
"""How many plain parameters have been made."""


def is_dtensor(value: object) -> bool:
    if not isinstance(value, Tensor) or not wraps_others(value):
        return False
    from torch.distributed.tensor import DTensor  # takes a second; whoever has one has imported it

    return isinstance(value, DTensor)


def dtensor_of(param: Tensor) -> DTensor | None:
    """The DTensor that a plain parameter stands for, also of what is shown in its place; None for others."""
    plain = plain_of(param)
    found: DTensor | None = _dtensors.get(param if plain is None else plain)
    return found


def plain_of(param: Any) -> nn.Parameter | None:
    """The plain parameter that stands for a DTensor; None for others."""
    reference = _plain.get(param) if is_dtensor(param) else None
    return None if reference is None else reference()


def made_plain(param: Any) -> nn.Parameter:
    """The plain parameter that stands for a DTensor, made if there is none."""
    global made
    found = plain_of(param)
    if found is None:
        found = nn.Parameter(param.detach().to_local(), requires_grad=param.requires_grad)
        _dtensors[found], _plain[param] = param, ref(found)
        made += 1
    return found


def is_apart(param: nn.Parameter) -> bool:
    """Whether no module has a plain parameter: the DTensor that it stands for still has its values."""
    dtensor: Any = dtensor_of(param)
    return dtensor is not None and bool(param.numel() and dtensor.detach().to_local().numel())


def forget(param: nn.Parameter) -> None:
    """The DTensor is the module's own again."""
    del _plain[_dtensors.pop(param)]


def comm_of(dtensor: DTensor) -> Comm:
    mesh = dtensor.device_mesh
    if mesh not in _comms:
        _comms[mesh] = Comm(mesh.get_group())
    found: Comm = _comms[mesh]
    return found


def is_cut(dtensor: DTensor) -> bool:
    """Whether ranks have different elements of a DTensor."""
    return dtensor.placements[0].is_shard() and dtensor.device_mesh.size() > 1


def like(dtensor: DTensor, local: Tensor) -> DTensor:
    """A DTensor of a local tensor, with the placement and shape of another. autograd leads to `local`."""
    from torch.distributed.tensor import DTensor

    mesh, placements = dtensor.device_mesh, dtensor.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=dtensor.shape, stride=dtensor.stride())


def shown(param: nn.Parameter) -> Any:
    dtensor = dtensor_of(param)
    assert dtensor is not None
    made: Any = like(dtensor, param if torch.is_grad_enabled() else param.detach()).requires_grad_(param.requires_grad)
    _plain[made] = ref(param)
    return made
