"""G-SGD in Lightning: `configure_optimizers` returns it like any other.

python examples/lightning_module.py                               # one process
torchrun --nproc-per-node 2 examples/lightning_module.py          # DistributedDataParallel
"""

import os
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gspace


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = gspace.GSGD(self.net, lr=0.1, momentum=0.9, weight_decay=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)]


def data() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(0)
    x, teacher = torch.randn(256, 20, generator=draw), torch.randn(20, 5, generator=draw)
    return DataLoader(TensorDataset(x, (x @ teacher).argmax(1)), batch_size=16)


def train(folder: str = "lightning", epochs: int = 2, resume: str | None = None, **options: Any) -> lightning.Trainer:
    trainer = lightning.Trainer(default_root_dir=folder, max_epochs=epochs, logger=False, **options)
    trainer.fit(Classifier(), data(), ckpt_path=resume)
    return trainer


if __name__ == "__main__":
    train(devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # as many as torchrun has started
