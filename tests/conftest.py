"""One thread per worker, the same draws in every run, and no GPU test without a GPU."""

import os

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Whatever ran before in this process."""
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
