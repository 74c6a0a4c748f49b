"""partition="whole": optimizers that read whole parameters train as without sharding, and ranks own about as much."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Adafactor, AdamW, Muon, Optimizer

import ranks
import zero
from assertions import plain
from optimizers import Lamb, Shampoo
from rows import Rows
from zoo import WIDTH, Stack


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.transposed = nn.Parameter(torch.randn(WIDTH, 7).t() / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x)))) @ self.transposed.t() @ self.transposed


net = partial(Stack, Block, classes=3)


class Both(Optimizer):
    """Muon for matrices, and AdamW for the rest, as one. It has the parameters of both, and steps by them."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        matrices, rest = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
        super().__init__(params, {})
        self.shards = [Muon(matrices, lr=0.02), AdamW(rest, lr=1e-3)]

    def step(self) -> None:  # type: ignore[override]
        for optimizer in self.shards:
            optimizer.step()


WHOLE = {"partition": "whole", "auto_wrap_policy": ModuleWrapPolicy({Block})}

row = Rows("optimizers that read whole parameters", __name__, net=net, same={3})
row.of("Muon beside AdamW", optim=Both, fsdp=WHOLE)
how = WHOLE | {"reshard_after_forward": False}
row.of("Shampoo with kept units", optim=Shampoo, fsdp=how, tolerance=1e-5)  # products round by where gradients lie
row.of("LAMB for which setup chooses the cut", optim=Lamb)
row.of("Adafactor for which setup chooses the cut", optim=partial(Adafactor, lr=0.05))
test_rows = row.tests()


def owned(rank: int, world: int, frozen: bool) -> tuple[list[int], list[int]]:
    """Elements that this rank owns, and all, of every trained parameter."""
    model = net(blocks=8)
    for block in model.blocks[: 4 * frozen]:
        block.up.requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    whole = [param.numel() for param in trained]
    zero.FSDP(model, partition="whole")
    return [plain(param).numel() for param in trained], whole


@pytest.mark.parametrize(("world", "frozen"), [(2, False), (3, True)])
def test_each_parameter_is_with_one_rank_and_ranks_own_about_as_much_over_all_units(world, frozen):
    """Each unit has two large matrices: by itself it could not be cut for three ranks."""
    found = ranks.run(owned, world, args=(frozen,))
    whole = found[0][1]
    for size, *parts in zip(whole, *(own for own, _ in found), strict=True):
        assert sorted(parts) == [*[0] * (world - 1), size]
    assert max(sum(own) for own, _ in found) <= 1.1 * sum(whole) / world
