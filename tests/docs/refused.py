"""What type checkers refuse: mypy reports an ignore that nothing needs (warn_unused_ignores)."""

import torch
from torch import nn

import zero
from zero.integrations.accelerate import ZeroPlugin

model = nn.Linear(4, 4)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
zero.setup(model, sgd, stage=2, precison="bf16")  # type: ignore[call-overload]
zero.setup(model, sgd, stage=2, precision="bf61")  # type: ignore[call-overload]
zero.setup(model, sgd, stage="3 keep")  # type: ignore[call-overload]
zero.FSDP(model, offlaod=zero.CPUOffload())  # type: ignore[call-arg]
ZeroPlugin(2, precison="bf16")  # type: ignore[call-arg]
zero.setup(model, [sgd], stage=2, precison="bf16")  # type: ignore[call-overload]
