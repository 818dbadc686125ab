"""G-SGD with Accelerate: make it of the model, then `prepare` both.

accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gspace


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    x, teacher = torch.randn(256, 20, generator=draw), torch.randn(20, 5, generator=draw)
    return TensorDataset(x, (x @ teacher).argmax(1))


def train(epochs: int = 2, save: str | None = None, resume: str | None = None, cpu: bool = False) -> nn.Module:
    accelerator = Accelerator(cpu=cpu)
    net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    made = gspace.GSGD(net, lr=0.1, momentum=0.9, weight_decay=1e-4)
    model, optimizer, loader = accelerator.prepare(net, made, DataLoader(data(), batch_size=16))
    if resume is not None:
        accelerator.load_state(resume)
    for _ in range(epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"loss {loss.item():.4f}")
    if save is not None:
        accelerator.save_state(save)
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    train()
