"""Trains on two workers of Ray Train. When one dies, Ray starts both anew, and they go on from the last report.

python docs/examples/ray_train.py /shared/runs
"""

import sys
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn

import zero


def train(config: dict[str, Any]) -> None:
    context, device = ray.train.get_context(), ray.train.torch.get_device()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(device)
    model, optimizer = zero.setup(net, torch.optim.AdamW, config["stage"], lr=1e-2)
    data = torch.Generator().manual_seed(1)  # alike everywhere: workers share a batch

    step, reported = 0, ray.train.get_checkpoint()
    if reported:
        saved = zero.checkpoint.load(reported.path, model, optimizer, resume=data)
        step = saved["step"]
    run = f"{context.get_storage().experiment_fs_path}/checkpoints"
    while step < config["steps"]:
        inputs = torch.randn(12, 32, generator=data)[rank::world].to(device)
        loss = (model(inputs) - inputs.sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % config["save_every"]:
            continue
        extra = {"step": step}
        to = zero.checkpoint.save(run, model, optimizer, resume=data, extra=extra)
        ray.train.report(
            {"step": step, "loss": loss.item()},  # of rank 0
            checkpoint=ray.train.Checkpoint.from_directory(to.path),
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )


if __name__ == "__main__":
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"stage": 3, "steps": 200, "save_every": 10},
        scaling_config=ray.train.ScalingConfig(num_workers=2),  # use_gpu=True: a GPU each
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=sys.argv[1],  # that all workers see
            failure_config=ray.train.FailureConfig(max_failures=3),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    print(trainer.fit().metrics)
