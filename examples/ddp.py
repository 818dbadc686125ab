"""G-SGD under DistributedDataParallel. Nothing is special: give the optimizer the model, wrapped or not.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gspace


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    x, teacher = torch.randn(256, 20, generator=draw), torch.randn(20, 5, generator=draw)
    return TensorDataset(x, (x @ teacher).argmax(1))


def train(epochs: int = 2) -> tuple[nn.Module, float]:
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = gspace.GSGD(model, lr=0.1, momentum=0.9, weight_decay=1e-4)
    parallel = DistributedDataParallel(model)  # the skeleton is chosen at the first step, in the weights it broadcast
    sampler = DistributedSampler(found := data())
    loss = torch.tensor(0.0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(found, batch_size=16, sampler=sampler):
            loss = nn.functional.cross_entropy(parallel(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model, loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")  # "nccl" with GPUs, and model and batches on `cuda:LOCAL_RANK`
    print(f"rank {dist.get_rank()}: loss {train()[1]:.4f}")
    dist.destroy_process_group()
