"""Training runs to save and to go on from, what they come to as full tensors, and a reader that is not zero's."""

import hashlib
import json
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import objects  # noqa: F401 - registers its URLs, in every rank's process
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import plainly
import zero
import zoo
from optimizers import Moments
from runs import on_mesh, stage_2, stage_3, take_step, train_step
from zoo import CASES, Batch

CASE = CASES["mlp"]  # frozen, tied, unused, empty, 0-dim and non-contiguous parameters


OPTIMIZERS = zoo.OPTIMIZERS | {"moments": partial(Moments, dtype=torch.bfloat16)}


@dataclass(frozen=True)
class Config:
    """How a run trains, at whatever stage. masters: 16-bit parameters and float32 masters, however a stage has them.
    offload, replicas: where a stage has them."""

    optim: str = "adamw"
    cut: str = "even"
    masters: bool = False
    offload: bool = False
    replicas: int = 1

    def build(self, stage: int, seed: int = 0) -> tuple[nn.Module, Any]:
        model, options = CASE.model(seed), {"partition": self.cut} if stage else {}
        if self.masters and stage == 3:
            options["precision"] = "bf16"
        elif self.masters:
            model = model.bfloat16()
            options |= {"precision": "bf16"} if stage else {}
        if self.offload and stage:
            options["offload"] = zero.CPUOffload(pin_memory=False)
        optim = OPTIMIZERS[self.optim]
        if stage == 3:
            replicated = self.replicas > 1 and dist.get_world_size() > self.replicas
            options |= on_mesh(dist.get_world_size(), {"replicas": self.replicas}) if replicated else {}
            return stage_3(model, optim, **options)
        if stage == 2:
            return stage_2(model, optim, **options)
        optimizer = zero.OSS(model.parameters(), optim, **options) if stage else optim(model.parameters())
        return DistributedDataParallel(model, **CASE.ddp) if dist.is_initialized() else model, optimizer


CONFIGS = [Config(), Config("sgd"), Config(cut="whole"), Config(masters=True)]


def steps(model: nn.Module, optimizer: Optimizer, first: int, count: int) -> list[float]:
    """Trains on the same data on every rank, so that the number of ranks does not matter."""
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(first, first + count):
        batch = CASE.batch(0, step)
        inputs = tuple(value.to(dtype) if isinstance(value, Tensor) else value for value in batch.inputs)
        losses += train_step(model, optimizer, [Batch(inputs, batch.targets)])
    return losses


def whole(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Collective. All that a checkpoint must bring back, as full tensors by name, masters in place of parameters."""
    inner = getattr(model, "module", model)
    names = {param: name for name, param in inner.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found: dict[str, Any] = {f"model/{name}": value for name, value in zero.full_state_dict(model, to=None).items()}
    for number, state in zero.full_optimizer_state_dict(model, optimizer, to=None)["state"].items():
        for key, value in state.items():
            path = f"model/{names[params[number]]}" if key == "zero_master" else f"{names[params[number]]}/{key}"
            found[path] = value.clone() if isinstance(value, Tensor) else value
    for name, value in inner.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and value in names:  # tied
            found[f"model/{name}"] = found[f"model/{names[value]}"]
    return found


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Names of what is not the same bit for bit; a parameter of fewer bits is compared after rounding."""
    names = []
    for name in {**expected, **found}:
        one, other = expected.get(name), found.get(name)
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
            if not torch.equal(one.to(narrow), other.to(narrow)):
                names.append(name)
        elif one != other:
            names.append(name)
    return names


def read_plainly(checkpoint: Path) -> dict[str, Any]:
    """All that a checkpoint holds, by `json` and `safetensors` alone, named as `whole` names it."""
    index = json.loads((checkpoint / "index.json").read_text())

    def tensor(path: str) -> Tensor:
        return plainly.tensor(checkpoint, index["tensors"][path])

    found: dict[str, Any] = {path: tensor(path) for path in index["tensors"] if path.startswith("model/")}
    masters = [path for path in index["tensors"] if path.startswith("master/")]
    found |= {f"model/{path.removeprefix('master/')}": tensor(path) for path in masters}
    found |= {f"model/{name}": found[f"model/{home}"] for name, home in index["tied"].items()}
    for path in index["tensors"]:
        if path.startswith("optimizer/0/"):
            found[path.removeprefix("optimizer/0/")] = tensor(path)
    for path, told in index["values"].items():
        found[path.removeprefix("optimizer/0/")] = torch.tensor(told["value"]) if isinstance(told, dict) else told
    return found


def save_and_go_on(rank: int, world: int, path: str, stage: int, config: Config) -> tuple[dict[str, Any], ...]:
    """Two steps, a save, three steps; what the run was when it was saved, and in the end."""
    model, optimizer = config.build(stage)
    steps(model, optimizer, 0, 2)
    optimizer.param_groups[0]["lr"] = 0.0125
    zero.checkpoint.save(path, model, optimizer, extra={"step": 2})
    then = whole(model, optimizer)
    steps(model, optimizer, 2, 3)
    return then, whole(model, optimizer)


def load_and_go_on(rank: int, world: int, jobs: list[tuple[str, int, Config]]) -> list[tuple[dict[str, Any], ...]]:
    """For each (path, stage, config): what a fresh model is after loading, and three steps later."""
    results = []
    for path, stage, config in jobs:
        model, optimizer = config.build(stage, seed=1)
        steps(model, optimizer, 7, 1)
        assert zero.checkpoint.load(path, model, optimizer) == {"step": 2}
        assert optimizer.param_groups[0]["lr"] == 0.0125
        then = whole(model, optimizer)
        steps(model, optimizer, 2, 3)
        later = whole(model, optimizer)
        results.append((then, later) if rank in (0, world - 1) else ())
    return results


def messages_of_failing_saves(path: str, model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Collective. What a save says that cannot be made, one that is waited for and one behind training."""
    told = []
    for wait in [True, False]:
        with pytest.raises(zero.checkpoint.CheckpointError) as caught:
            zero.checkpoint.save(path, model, optimizer, wait=wait).wait()
        told.append(str(caught.value))
    return told


def tiny(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3))


def train(model: nn.Module, optimizer: Optimizer, count: int = 2) -> dict[str, Any]:
    """Steps of what is built like `tiny`; the weights then."""
    torch.manual_seed(0)
    for _ in range(count):
        take_step(optimizer, model(torch.randn(5, 4)).square().sum())
    return zero.full_state_dict(model, to=None)


def adam(**options: Any) -> Callable[..., Optimizer]:
    return partial(torch.optim.Adam, lr=1e-2, **options)


def with_adam(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    return model, adam()(model.parameters())


def change_index(checkpoint: Path, change: Callable[[Any], object], *, resign: bool = True) -> None:
    file = checkpoint / "index.json"
    told = json.loads(file.read_text())
    change(told)
    if resign:
        told.pop("sha256", None)
        told["sha256"] = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(told))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Runs:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


class Counting(nn.Linear):
    def __init__(self, seen: Any = None) -> None:
        super().__init__(2, 2)
        self.seen = seen

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Blockwise(torch.optim.SGD):
    """Keeps one number for every 16 elements, from the seventh step on: measuring looks at six."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups if self.steps > 6 else ():
            for param in group["params"]:
                self.state[param]["absmax"] = torch.zeros(-(-param.numel() // 16))
        return super().step(closure)
