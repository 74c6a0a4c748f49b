"""Models of the transformers library, tiny and with random weights, and batches for them.

They are as their configurations leave them: dropout is on, caches are filled, weights are tied where the family ties
them. What is drawn at random in a forward is drawn from a seed of the rank and step, so it is the same for any wrapper.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers as hf
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block, T5Stack
from transformers.models.vit.modeling_vit import ViTLayer

VOCABULARY, LENGTH = 61, 10
EXPERTS = 6

_decoder = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.1,
}


def gpt2() -> nn.Module:
    config = hf.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=VOCABULARY, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    return hf.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_decoder))


def mixtral(**options: Any) -> nn.Module:
    """Its experts lie in one parameter a layer. The loss has the router's share, read from inside the layers."""
    config = hf.MixtralConfig(
        **_decoder, num_local_experts=EXPERTS, num_experts_per_tok=2, output_router_logits=True, **options
    )
    return hf.MixtralForCausalLM(config)


def t5() -> nn.Module:
    config = hf.T5Config(
        num_layers=2, d_model=32, d_ff=44, num_heads=2, d_kv=16, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = hf.ViTConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=44,
        num_attention_heads=2,
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        initializer_range=0.2,  # learns sooner than from the default
        hidden_dropout_prob=0.1,
    )
    return hf.ViTForImageClassification(config)


class Tagger(nn.Module):
    """A label for every token. What BERT's pooler makes of the first one is not used."""

    def __init__(self) -> None:
        super().__init__()
        config = hf.BertConfig(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=44,
            num_attention_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=16,
        )
        self.bert = hf.BertModel(config)
        self.head = nn.Linear(32, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def text(random: torch.Generator, rank: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (3, LENGTH), generator=random)
    return {"input_ids": tokens, "labels": tokens}


def repeated_text(random: torch.Generator, rank: int) -> dict[str, Tensor]:
    """One token only, another on each rank: few experts are asked, and not the same ones everywhere."""
    tokens = torch.full((2, 4), 5 + 20 * rank)
    return {"input_ids": tokens, "labels": torch.randint(3, VOCABULARY, (2, 4), generator=random)}


def padded_text(random: torch.Generator, rank: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (3, LENGTH), generator=random)
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [7 - rank], [4]])).long()
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens % 5}


def pairs_of_text(random: torch.Generator, rank: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(3, VOCABULARY, (3, LENGTH - rank), generator=random),
        "labels": torch.randint(3, VOCABULARY, (3, 6 + rank), generator=random),
    }


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images of shape [1797, 1, 8, 8], from 0 to 1, and which digit each shows."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)


def some_digits(random: torch.Generator, rank: int, number: int = 16) -> dict[str, Tensor]:
    images, labels = digits()
    chosen = torch.randint(len(images) - 500, (number,), generator=random)  # the last 500 are for tests
    return {"pixel_values": images[chosen], "labels": labels[chosen]}


@dataclass(frozen=True)
class Family:
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int], dict[str, Tensor]]
    blocks: set[type[nn.Module]]
    """What a user would name in a ModuleWrapPolicy."""
    units: int
    """Units that FSDP makes without a policy: the root and the blocks."""
    ddp: dict[str, Any] = field(default_factory=dict)

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build().train()

    def batch(self, rank: int, step: int) -> dict[str, Tensor]:
        return self.draw(torch.Generator().manual_seed(1000 * rank + step), rank)

    def loss(self, rank: int, step: int) -> Callable[[nn.Module], Tensor]:
        batch = self.batch(rank, step)

        def loss_of(model: nn.Module) -> Tensor:
            torch.manual_seed(1000 * rank + step)
            return model(**batch)["loss"]

        return loss_of


FAMILIES = {
    "gpt2": Family(gpt2, text, {GPT2Block, GPT2MLP}, units=3),
    "llama": Family(llama, text, {LlamaDecoderLayer}, units=3),
    "bert": Family(Tagger, padded_text, {BertLayer}, units=3, ddp={"find_unused_parameters": True}),
    "vit": Family(vit, some_digits, {ViTLayer}, units=3),
    "mixtral": Family(mixtral, repeated_text, {MixtralDecoderLayer}, units=3),
    "t5": Family(t5, pairs_of_text, {T5Block, T5Stack}, units=5),
}
