"""A small language model by Accelerate. The import and the Accelerator's argument are all that zero changes.

    torchrun --nproc-per-node 2 docs/examples/accelerate_train.py --stage 3
    accelerate launch --config_file fsdp.yaml docs/examples/accelerate_train.py
    torchrun --nproc-per-node 2 docs/examples/accelerate_train.py --config deepspeed.yaml

Without --stage and --config the fsdp_config of `accelerate launch` says how to shard. The data is this documentation,
byte by byte. Every 20 steps the state is saved; --resume goes on from it, at any stage.
"""

import argparse
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

from zero.integrations.accelerate import Accelerator, ZeroPlugin  # was: from accelerate import Accelerator

LENGTH = 64


def batches(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Of training and of evaluation."""
    pages = sorted(Path(__file__).parents[1].glob("*.md"))
    text = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    train, evaluated = rows[64:].clone(), rows[:64].clone()
    return (
        DataLoader(TensorDataset(train), batch_size, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(evaluated), batch_size),
    )


def train(options: argparse.Namespace) -> None:
    plugin = ZeroPlugin.from_yaml(options.config) if options.config else options.stage
    accelerator = Accelerator(
        zero_plugin=plugin,
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=2,
        project_dir=options.output,
    )
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = 2 * options.steps * accelerator.num_processes  # Accelerate steps a scheduler once for each rank
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=steps)
    train_loader, eval_loader = batches(options.batch_size)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    done, state = 0, Path(options.output, "state")
    if options.resume:
        accelerator.load_state(str(state))
        done = int((state / "steps").read_text())
    model.train()
    while done < options.steps:
        for (tokens,) in train_loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            if accelerator.sync_gradients and done % 20 == 0:
                accelerator.save_state(str(state))
                if accelerator.is_main_process:
                    (state / "steps").write_text(str(done))
            if done == options.steps:
                break

    model.eval()
    with torch.no_grad():
        losses = [model(input_ids=tokens, labels=tokens).loss for (tokens,) in eval_loader]
    loss = accelerator.gather_for_metrics(torch.stack(losses)).mean()
    accelerator.print(f"{type(model).__name__}: loss {loss.item():.4f} after {done} steps")
    accelerator.unwrap_model(model).save_pretrained(
        f"{options.output}/model",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),  # collective: full weights
    )
    accelerator.end_training()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int)
    parser.add_argument("--config", help="one of Accelerate's files, such as one with a deepspeed_config")
    parser.add_argument("--output", default="run")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--resume", action="store_true")
    train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
