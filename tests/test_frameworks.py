"""The examples run, two processes that start apart end equal, and a checkpoint of each framework goes on bit for bit.

Each process draws other weights, and what makes them agree is the framework's own broadcast: the optimizer must not
have looked at the weights before. What resumes draws others again: nothing but the checkpoint can bring them back.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import Ranks, running

EXAMPLES = str(Path(__file__).parent.parent / "examples")
QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with running(2, EXAMPLES) as ranks:
        yield ranks


def example(name: str, seed: int) -> Any:
    """An example, with a seed that no other rank has."""
    torch.manual_seed(seed + dist.get_rank())
    return importlib.import_module(name)


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def lightning(seed: int, folder: str, epochs: int, resume: str | None = None) -> list[Tensor]:
    train = example("lightning_module", seed).train
    trainer = train(folder, epochs, resume, accelerator="cpu", devices=2, strategy="ddp", **QUIET)
    assert trainer.world_size == 2
    trainer.save_checkpoint(f"{folder}/{epochs}.ckpt")
    assert torch.initial_seed() == seed + dist.get_rank()
    return weights(trainer.lightning_module)


def accelerate(seed: int, epochs: int, save: str | None = None, resume: str | None = None) -> list[Tensor]:
    net = example("accelerate_loop", seed).train(epochs, save, resume, cpu=True)
    assert importlib.import_module("accelerate").PartialState().num_processes == 2
    return weights(net)


def hugging_face(seed: int, folder: str, steps: int, resume: str | None = None) -> list[Tensor]:
    options: dict[str, Any] = {"use_cpu": True, "ddp_backend": "gloo", "disable_tqdm": True, "save_steps": 4}
    train = example("hf_trainer", seed).train
    trainer = train(folder, steps, resume, lr_scheduler_type="constant_with_warmup", **options)
    assert trainer.args.world_size == 2
    return weights(trainer.model)


def require_equal(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second) > 0
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def require_goes_on(whole: list[list[Tensor]], resumed: list[list[Tensor]]) -> None:
    """Ranks agree, and what was interrupted ends where what was not ends."""
    require_equal(*whole)
    require_equal(*resumed)
    require_equal(whole[0], resumed[0])


def test_lightning(two: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("lightning", exc_type=ImportError)
    whole = two(lightning, 1, str(tmp_path / "whole"), 4)
    two(lightning, 1, str(tmp_path / "half"), 2)
    require_goes_on(whole, two(lightning, 7, str(tmp_path / "more"), 4, str(tmp_path / "half" / "2.ckpt")))


def test_accelerate(two: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", exc_type=ImportError)
    whole, half = two(accelerate, 1, 4), str(tmp_path / "half")
    two(accelerate, 1, 2, half)
    require_goes_on(whole, two(accelerate, 7, 2, None, half))


def test_trainer_of_hugging_face(two: Ranks, tmp_path: Path) -> None:
    for name in ("transformers", "accelerate"):
        pytest.importorskip(name, exc_type=ImportError)
    whole = two(hugging_face, 1, str(tmp_path), 8)
    require_goes_on(whole, two(hugging_face, 7, str(tmp_path), 8, str(tmp_path / "checkpoint-4")))


def test_timm() -> None:
    pytest.importorskip("timm", exc_type=ImportError)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        model, losses = importlib.import_module("timm_loop").train()
    assert losses[-1] < losses[0] / 2
    assert all(bool(p.isfinite().all()) for p in model.parameters())
