"""One thread per worker, the same draws in every run, few of them unless asked, and no GPU test without a GPU."""

import gc
import os

import pytest
import torch
from hypothesis import settings

import vision

torch.set_num_threads(1)
torch.manual_seed(0)  # modules that are made when tests are collected
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

vision.declare()  # before anything imports transformers or timm

settings.register_profile("few", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("many", settings.get_profile("few"), max_examples=250)  # make test-all
settings.load_profile("few")


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """Takes what earlier tests imported out of the collector's sight: runs and compilations collect, and often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Whatever ran before in this process."""
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else what C++ libraries hold is reported as a leak


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
