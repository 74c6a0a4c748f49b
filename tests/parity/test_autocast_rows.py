"""Training under torch.autocast, as DistributedDataParallel trains under the same."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import gpus
from rows import Net, Rows, momentum
from zoo import WIDTH, Block

row = Rows("autocast", __name__, optim=momentum)


def in_order(order):
    """A forward without gradients, then two, and a backward of each: in turn, together, or after one another."""

    def program(t, i):
        dtype = next(t.n.parameters()).dtype
        first, second = (t.batch(10 * i + k).to(dtype) for k in range(2))
        # DistributedDataParallel itself reduces the first only of backwards after several forwards.
        turns = order == "in turn" or (order == "after one another" and t.stage < 2)
        with torch.autocast(gpus.DEVICE, torch.bfloat16):
            with torch.no_grad():
                t.m(first)
            losses = []
            for inputs in (first, second):
                losses.append(t.m(inputs).float().square().mean())
                if turns:
                    losses.pop().backward()
            for loss in [sum(losses)] if order == "together" else losses:
                loss.backward()
            if t.stage:  # within the limit: torch's own does not take 16 bits under autocast
                clip_grad_norm_(t.m.parameters(), 1e3)
            t.update(None)

    return program


# In float16 DistributedDataParallel rounds sums of an averaged and a local gradient, where others add up averages.
UNUSED = {"find_unused_parameters": True}
HALF = {"net": lambda: Net().half(), "tolerance": 2e-3}
row.of("backwards in turn", in_order("in turn"), tolerance=1e-5)
row.of("one backward of two forwards", in_order("together"))
row.of("backwards after one another", in_order("after one another"), tolerance=1e-5)
row.of("backwards in turn in float16", in_order("in turn"), **HALF)
row.of("backwards after one another in float16", in_order("after one another"), **HALF)


class Deep(nn.Module):
    """A block that runs without gradients, and then with them."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.blocks, self.last, self.first = nn.ModuleList([Block(WIDTH), Block(WIDTH)]), nn.Linear(WIDTH, 3), first

    def forward(self, x: Tensor) -> Tensor:
        for times in (2, 1):
            with torch.set_grad_enabled(times == 1 and torch.is_grad_enabled()):
                for _ in range(times):
                    for block in self.blocks[: 1 if self.first else 2]:
                        x = block(x)
        return self.last(x)


def trained_under_it(t, i):
    with torch.autocast(gpus.DEVICE, torch.bfloat16):
        loss = t.loss(i)
    t.update(loss)


for first in (True, False):
    words = "the first block runs" if first else "all blocks run"
    row.of(f"{words} without gradients and then with them", trained_under_it, net=partial(Deep, first), ddp=UNUSED)
test_rows = row.tests()
