"""G-SGD for a model of timm, with timm's parameter groups and schedule.

python examples/timm_loop.py
"""

import timm
import torch
from timm.optim import param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from torch import nn

import gspace


def data(count: int = 64, size: int = 32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Images whose class is their brightest colour."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, size, size, generator=draw) * 0.3 + torch.randn(count, 3, 1, 1, generator=draw)
    return list(zip(x.split(16), x.mean((2, 3)).argmax(1).split(16), strict=True))


def train(name: str = "resnet10t", epochs: int = 2) -> tuple[nn.Module, list[float]]:
    model = timm.create_model(name, num_classes=3)
    groups = param_groups_weight_decay(model, weight_decay=1e-4)  # none for biases and norms
    optimizer = gspace.GSGD(model, lr=0.05, momentum=0.9, params=groups, example_input=torch.zeros(2, 3, 32, 32))
    schedule = CosineLRScheduler(optimizer, t_initial=epochs, warmup_t=0)
    losses = []
    for epoch in range(epochs):
        model.train()
        for x, y in data():
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        schedule.step(epoch + 1)
    return model, losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in train()[1]))
