"""Tools that look at the memory behind weights (safetensors, pickle) see independent tensors at each stage."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from torch.optim import SGD

import ranks
import zero
from reference import at_stage


class Net(nn.Module):
    """Many small parameters, so that they share a buffer; two names for one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.norm = nn.BatchNorm1d(6)
        self.tied = self.layers[1]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(torch.tanh(layer(x)))
        return x


def trained(stage: int, rank: int) -> tuple[nn.Module, nn.Module]:
    """A model after a step, and what lies inside of its wrapper."""
    if stage == 3:
        model: nn.Module = zero.FSDP(Net())
        optimizer: torch.optim.Optimizer = SGD(model.parameters(), 0.1)
    else:
        model, optimizer = at_stage(stage, Net(), SGD, lr=0.1)
    torch.manual_seed(rank)
    model(torch.randn(8, 6)).square().sum().backward()
    optimizer.step()
    return model, model.module


def untied(weights: dict[str, Tensor]) -> None:
    """As safetensors sees it: only names of one parameter share memory, and all of it is a parameter's own."""
    storages: dict[int, set[str]] = {}
    for name, value in weights.items():
        storage = value.untyped_storage()
        assert storage.nbytes() == value.nbytes, name
        storages.setdefault(storage.data_ptr(), set()).add(name.removeprefix("module.").replace("tied", "layers.1"))
    assert all(len(names) == 1 for names in storages.values()), storages


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_weights_are_saved_completely(rank: int, world: int, stage: int, tmp_path: Path) -> None:
    model, inner = trained(stage, rank)
    weights = zero.full_state_dict(model)
    untied(weights)
    untied(model.state_dict())
    if stage == 3:
        with model.summon_full_params():
            inner_weights = inner.state_dict()
            untied(inner_weights)
            save_model(inner, tmp_path / f"model{rank}.safetensors")
    else:
        inner_weights = inner.state_dict()
        untied(inner_weights)
        save_model(inner, tmp_path / f"model{rank}.safetensors")
        assert len(pickle.dumps(inner)) < 2 * len(pickle.dumps(Net()))
        untied(copy.deepcopy(inner).state_dict())
    # save_file refuses tensors that share memory, as tied ones do.
    once = {name: value for name, value in model.state_dict().items() if "tied" not in name}
    save_file(once, tmp_path / f"state_dict{rank}.safetensors")
    for kind in ("model", "state_dict"):
        again = Net()
        found = load_file(tmp_path / f"{kind}{rank}.safetensors")
        found = {name.removeprefix("module."): value for name, value in found.items()}
        missing, unexpected = again.load_state_dict(found, strict=False)
        assert not unexpected
        assert all("tied" in name or "layers.1" in name for name in missing)
        assert all(torch.equal(value, weights[name]) for name, value in again.state_dict().items())
