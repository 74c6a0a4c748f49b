"""A small GPT learns a text byte by byte, with all that a training has in plain PyTorch. --stage says what is sharded.

    python docs/examples/train_gpt.py --stage 0
    torchrun --nproc-per-node 2 docs/examples/train_gpt.py --stage 3 --bf16
    torchrun --nproc-per-node 2 docs/examples/train_gpt.py --stage 2 --bf16 --steps 400  # goes on, at another stage

It runs alone and under torchrun, on CPUs and GPUs. Started again with the same --output it goes on from the latest
checkpoint, on as many ranks to the same numbers as if it had not been interrupted. With tqdm it shows a bar, and with
matplotlib it draws its losses and its memory at the end.
"""

import argparse
import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zero

Losses = dict[int, float]  # by step


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm_1, self.norm_2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """The mean loss of all bytes but the first, in nats. text: bytes as int64, of shape (batch, context + 1)."""
        x = self.embedding(text[:, :-1]) + self.position.weight
        for block in self.blocks:  # in training a block's activations are computed again in backward, not kept
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


def batches(loader: DataLoader, sampler: DistributedSampler, done: int) -> Iterator[Tensor]:
    """The batches after the first `done`, epoch by epoch, each shuffled in its own way."""
    while True:
        sampler.set_epoch(done // len(loader))
        for (batch,) in islice(loader, done % len(loader), None):
            done += 1
            yield batch


def bar(steps: range, shown: bool) -> Iterable[int]:
    if shown and find_spec("tqdm"):
        return import_module("tqdm").tqdm(steps, desc="steps")
    return steps


def draw(file: str, losses: Losses, evaluated: Losses, held: dict[str, int]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained", facecolor="white")
    of_loss, of_memory = figure.subplots(1, 2, width_ratios=(2, 1))
    of_loss.plot([*losses], [*losses.values()], label="trained")
    of_loss.plot([*evaluated], [*evaluated.values()], "o-", label="evaluated")
    of_loss.set(xlabel="step", ylabel="loss")
    of_loss.legend()
    of_memory.bar([*held], [size / 2**20 for size in held.values()])
    of_memory.set(ylabel="MiB on rank 0")
    figure.savefig(file)


def train(options: argparse.Namespace, device: torch.device, rank: int, world: int) -> tuple[Losses, Losses]:
    """Returns this rank's losses, and those of the evaluations."""
    torch.manual_seed(0)
    pieces = torch.frombuffer(bytearray(Path(options.text).read_bytes()), dtype=torch.uint8).long()
    pieces = pieces.unfold(0, options.context + 1, options.context)
    training, evaluated = TensorDataset(pieces[64:]), TensorDataset(pieces[:64])
    sampler: DistributedSampler = DistributedSampler(training, world, rank)
    loader = DataLoader(training, options.batch_size, sampler=sampler, drop_last=True)
    eval_loader = DataLoader(evaluated, options.batch_size, sampler=DistributedSampler(evaluated, world, rank))
    net = GPT(options.context, options.width, options.layers).to(device)
    if options.compile:
        for block in net.blocks:
            block.compile()
    matrices = [param for param in net.parameters() if param.dim() > 1]
    others = [param for param in net.parameters() if param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    model, optimizer = zero.setup(net, torch.optim.AdamW, stage=options.stage, params=groups, lr=options.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    average = zero.EMA(model, decay=0.99)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=options.bf16, cache_enabled=False)

    def evaluate() -> float:
        model.eval()
        with torch.no_grad(), autocast, average.swapped():
            loss = torch.stack([model(batch.to(device)) for (batch,) in eval_loader]).mean()
        model.train()
        if dist.is_initialized():
            dist.all_reduce(loss)
        return loss.item() / world

    def save(step: int) -> None:
        extra = {"step": step, "scheduler": scheduler.state_dict()}
        zero.checkpoint.save(options.output, model, [optimizer, average], extra=extra, keep=2)

    start = 0
    losses: Losses = {}
    evaluated_at: Losses = {}
    saved = zero.checkpoint.load(options.output, model, [optimizer, average], missing_ok=True)
    if saved is not None:
        start = saved["step"]
        scheduler.load_state_dict(saved["scheduler"])
    elif options.start:  # a file of full weights and optimizer state, as is written below
        full = torch.load(options.start, map_location="cpu") if rank == 0 else {}
        zero.load_full_state_dict(model, full.get("weights"))
        zero.load_full_optimizer_state_dict(model, optimizer, full.get("optimizer"))
    data = batches(loader, sampler, done=start * options.accumulate)
    for step in bar(range(start + 1, options.steps + 1), shown=rank == 0):
        losses[step] = 0.0
        for number in range(options.accumulate):
            with zero.no_sync(model) if number < options.accumulate - 1 else nullcontext():
                with autocast:
                    loss = model(next(data).to(device))
                (loss / options.accumulate).backward()
                losses[step] += loss.item() / options.accumulate
        held = zero.report(model, [optimizer, average])
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        average.update()
        if step % options.save_every == 0 or step == options.steps:
            save(step)
            evaluated_at[step] = evaluate()
            if rank == 0:
                print(f"step {step}: evaluated {evaluated_at[step]:.4f}, norm of gradients {norm.item():.2f}")

    full = {"weights": zero.full_state_dict(model)}  # on rank 0; the others get {}
    full["optimizer"] = zero.full_optimizer_state_dict(model, optimizer)
    with average.swapped():
        full["average"] = zero.full_state_dict(model)
    if rank == 0:
        torch.save(full, f"{options.output}/full.pt")
    if rank == 0 and losses and find_spec("matplotlib"):
        sizes = {"weights": held.parameters, "gradients": held.gradients, "optimizer\nand average": held.optimizer}
        draw(f"{options.output}/training.svg", losses, evaluated_at, sizes)
    return losses, evaluated_at


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--stage", type=int, default=3)
    add("--text", default=argparse.__file__, help="a file; by default a module of Python's")
    add("--output", default="run", help="folder of checkpoints")
    add("--start", help="a file of full weights and optimizer state")
    add("--bf16", action="store_true")
    add("--compile", action="store_true")
    defaults = {"--steps": 200, "--save-every": 50, "--accumulate": 2, "--batch-size": 8}
    for name, default in {**defaults, "--context": 64, "--width": 64, "--layers": 2}.items():
        add(name, type=int, default=default)
    add("--lr", type=float, default=3e-3)
    add("--max-norm", type=float, default=1.0)
    options = parser.parse_args(arguments)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" in os.environ:  # torchrun sets it
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(options, device, rank, world)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
