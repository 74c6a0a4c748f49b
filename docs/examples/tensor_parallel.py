"""A small Llama that is tensor parallel over pairs of ranks, and sharded over the other dimension of the mesh.

    torchrun --nproc-per-node 4 docs/examples/tensor_parallel.py --stage 3

The blocks' linear layers are cut by columns and by rows, and what lies between them along the tokens
(SequenceParallel). On GPUs put the tensor parallel ranks on one host.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zero

WIDTH, HEADS, TOKENS = 32, 4, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.mixed = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 64, bias=False)
        self.down = nn.Linear(64, WIDTH, bias=False)

    def attention(self, x: Tensor) -> Tensor:
        # Of the heads, -1 takes those that this rank computes.
        q, k, v = (
            one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mixed(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        x_normed = self.before_mlp(x)
        return x + self.down(nn.functional.silu(self.gate(x_normed)) * self.up(x_normed))


class Llama(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def parallelise(model: Llama, mesh: dist.DeviceMesh) -> None:
    along_tokens = Shard(1)
    for block in model.blocks:
        plan: dict[str, ParallelStyle] = {}
        plan |= {name: ColwiseParallel(input_layouts=along_tokens) for name in ("query", "key", "value", "gate", "up")}
        plan |= {name: RowwiseParallel(output_layouts=along_tokens) for name in ("mixed", "down")}
        plan |= {name: SequenceParallel(use_local_output=True) for name in ("before_attention", "before_mlp")}
        parallelize_module(block, mesh, plan)
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=along_tokens),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=along_tokens, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)
    model = Llama().to(device)
    parallelise(model, mesh["tp"])
    model, optimizer = zero.setup(model, torch.optim.AdamW, stage=given.stage, device_mesh=mesh["dp"], lr=1e-2)
    torch.manual_seed(1 + mesh["dp"].get_local_rank())  # ranks of one place in "dp" have the same batches
    for _ in range(given.steps):
        tokens = (torch.randint(TOKENS, (4, 1)) + torch.arange(17)).remainder(TOKENS).to(device)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        zero.clip_grad_norm_(model, optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    weights = zero.full_state_dict(model, to=0)  # whole tensors on one rank, the others get none
    if weights:
        shapes = {tuple(weight.shape) for name, weight in weights.items() if name.endswith("gate.weight")}
        print(f"stage {given.stage}, loss {loss.item():.4f}, gate.weight {shapes}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # Gloo aborts at interpreter exit now and then


if __name__ == "__main__":
    main()
