"""AdamW in G-space on a model that FSDP2 shards, with a checkpoint that any number of ranks can go on from.

    torchrun --nproc-per-node 2 examples/fsdp.py

Analyze the model before it is sharded: afterwards that would gather it.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gspace


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    x, teacher = torch.randn(256, 20, generator=draw), torch.randn(20, 5, generator=draw)
    return TensorDataset(x, (x @ teacher).argmax(1))


def train(first: int = 0, last: int = 2, save: str = "", resume: str = "") -> tuple[nn.Module, float]:
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    analysis = gspace.analyze(model, residual="pin")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = gspace.InGSpace(model, torch.optim.AdamW, lr=1e-2, analysis=analysis)
    if resume:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=resume)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    sampler = DistributedSampler(found := data())
    loss = torch.tensor(0.0)
    for epoch in range(first, last):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(found, batch_size=16, sampler=sampler):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if save:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=save)
    return model, loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")  # "nccl" with GPUs, and model and batches on `cuda:LOCAL_RANK`
    print(f"rank {dist.get_rank()}: loss {train()[1]:.4f}")
    dist.destroy_process_group()
