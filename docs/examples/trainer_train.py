"""A small language model by Hugging Face's Trainer. The import and the argument zero_plugin are all that zero changes.

    torchrun --nproc-per-node 2 docs/examples/trainer_train.py --stage 3
    accelerate launch --config_file fsdp.yaml docs/examples/trainer_train.py
    torchrun --nproc-per-node 2 docs/examples/trainer_train.py --config deepspeed.yaml

Without --stage and --config the fsdp_config of `accelerate launch` says how to shard. The data is this documentation,
byte by byte. --resume goes on from the latest checkpoint, at any stage.
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from zero.integrations.accelerate import ZeroPlugin
from zero.integrations.transformers import Trainer  # was: from transformers import Trainer

LENGTH = 64


def rows() -> list[dict[str, torch.Tensor]]:
    pages = sorted(Path(__file__).parents[1].glob("*.md"))
    text = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)]


def train(options: argparse.Namespace) -> None:
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=5,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="steps",
        save_steps=20,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    data = rows()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data[64:],
        eval_dataset=data[:64],
        zero_plugin=ZeroPlugin.from_yaml(options.config) if options.config else options.stage,
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(f"{options.output}/model")  # collective: full weights, which from_pretrained loads
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"{type(trainer.model_wrapped).__name__}: loss {loss:.4f} after {trainer.state.global_step} steps")
    trainer.end()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int)
    parser.add_argument("--config", help="one of Accelerate's files, such as one with a deepspeed_config")
    parser.add_argument("--output", default="run")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--resume", action="store_true")
    train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
