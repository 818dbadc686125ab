"""AdamW in G-space with the Trainer of Hugging Face, which makes the optimizer itself: give it a factory.

python examples/hf_trainer.py
torchrun --nproc-per-node 2 examples/hf_trainer.py

transformers imports torchvision where it is installed: take both from one index, or leave torchvision out.
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import gspace


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count on from a random number, modulo 32."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + 7 * index) % 32
        return {"input_ids": tokens, "labels": tokens}


def train(folder: str = "hf", steps: int = 16, resume: str | None = None, **options: Any) -> Trainer:
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    analysis = gspace.analyze(model, {"input_ids": torch.arange(8)[None]}, residual="pin")
    trainer = Trainer(
        model,
        TrainingArguments(folder, max_steps=steps, learning_rate=3e-3, warmup_steps=2, report_to=[], **options),
        train_dataset=Counting(),
        optimizer_cls_and_kwargs=(
            gspace.factory(gspace.InGSpace, model, torch.optim.AdamW, analysis=analysis),
            {"lr": 3e-3},
        ),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    train(use_cpu=not torch.cuda.is_available())  # else several processes on a CPU would not know of each other
