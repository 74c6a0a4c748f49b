"""Steps the matrices of the blocks by Muon, and all else by AdamW.

torchrun --nproc-per-node 2 docs/examples/muon.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import zero

if "RANK" in os.environ:  # torchrun sets it
    dist.init_process_group("gloo")

layer = nn.TransformerEncoderLayer(32, nhead=2, dim_feedforward=64, batch_first=True)
blocks = nn.TransformerEncoder(layer, num_layers=2)
net = nn.Sequential(nn.Embedding(256, 32), blocks, nn.Linear(32, 256))
matrices = [param for param in blocks.parameters() if param.dim() == 2]
held = {*matrices}
rest = [param for param in net.parameters() if param not in held]
muon, adamw = torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)
model, (muon, adamw) = zero.setup(net, [muon, adamw], stage=3)

for _ in range(20):
    tokens = (torch.randint(256, (8, 1)) + torch.arange(17)) % 256
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    for optimizer in (muon, adamw):
        optimizer.step()
        optimizer.zero_grad()
print(f"loss {loss.item():.4f}")
