"""Plans a model that no machine holds here, and says which stage to take.

python docs/examples/plan.py
"""

import torch
from torch import nn

import zero

with torch.device("meta"):  # shapes without memory
    layer = nn.TransformerEncoderLayer(4096, 32, 16384, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=8)
    batch = torch.empty(2, 512, 4096)  # of one rank: so activations are counted

mixed = zero.MixedPrecision(param_dtype=torch.bfloat16)
plan = zero.plan(model, world_size=8, precision=mixed, memory=16 * 2**30, batch=[batch])
print(plan.table(), plan.why(8), sep="\n\n")
