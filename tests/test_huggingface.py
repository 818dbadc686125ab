"""Hugging Face models, untouched, from tiny configs: the count derived by hand, and outputs that no rescaling moves."""

from functools import cache

import pytest
import torch
from torch import nn

import gspace
from huggingface import FAMILIES, Family
from huggingface_more import MORE
from moved import moved

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # half a minute
BY_NAME = {family.name: family for family in (*FAMILIES, *MORE)}
every_family = pytest.mark.parametrize("name", BY_NAME)


def build(family: Family, seed: int = 0) -> nn.Module:
    """The model in float64: matrices N(0, 1/fan-in), vectors 0.3·N(0, 1) away from where the model starts them."""
    model = getattr(transformers, family.model)(getattr(transformers, family.config)(**family.options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            else:
                parameter.add_(0.3 * noise)
    return model.double()


@cache
def analysis(name: str) -> gspace.Analysis:
    """Of training and evaluation mode together."""
    family = BY_NAME[name]
    return gspace.analyze(build(family), [family.batch(seed) for seed in family.seeds], residual="tie")


@every_family
def test_counts(name: str) -> None:
    found, family = analysis(name), BY_NAME[name]
    assert (found.H, found.H_absorbed) == (family.H, family.H_absorbed)
    assert not found.unseen


@every_family
def test_rescaling_keeps_the_outputs_on_another_batch(name: str) -> None:
    family = BY_NAME[name]
    for mode, change in moved(build(family), family.batch(1), analysis(name)).items():
        assert change <= family.tolerance, mode
