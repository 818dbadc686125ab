"""The networks of the paper: layer counts, widths, parameter counts from closed forms, and their units."""

import math

import pytest
import torch
from torch import nn

from gspace import analyze
from gspace.lab.models import BLOCKS, MODELS, build_model, build_optimizer, mlp, stage_ends
from gspace.lab.recipe import Recipe

CIFAR = (3, 32, 32)


def weights(model: nn.Module, kind: type[nn.Module] = nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and isinstance(m, kind)]


@pytest.mark.parametrize("name", MODELS)
def test_every_network_gives_class_scores_and_a_gradient_everywhere(name: str) -> None:
    model = build_model(name, CIFAR, 7, hidden=(8, 8), width=4)
    scores = model(torch.randn(2, *CIFAR))
    assert scores.shape == (2, 7)
    scores.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("depth", BLOCKS)
def test_depth_counts_layers_with_weights(depth: int) -> None:
    plain = build_model(f"plain-{depth}", CIFAR, 10, width=2)
    assert len(weights(plain)) == depth
    resnet = build_model(f"resnet-{depth}", CIFAR, 10, width=2)
    projections = [m for m in weights(resnet, nn.Conv2d) if m.kernel_size == (1, 1)]
    assert len(weights(resnet)) - len(projections) == depth
    assert len(projections) == 3


def test_plain_34_has_the_widths_of_the_paper() -> None:
    model = build_model("plain-34", CIFAR, 10)
    widths = [m.out_channels for m in weights(model, nn.Conv2d)]
    assert widths == [64] * 7 + [128] * 8 + [256] * 12 + [512] * 6
    strides = [m.stride[0] for m in weights(model, nn.Conv2d)]
    assert [i for i, stride in enumerate(strides) if stride == 2] == [7, 15, 27]
    convolutions = 9 * sum(a * b for a, b in zip([3, *widths], widths, strict=False))
    assert sum(p.numel() for p in model.parameters()) == convolutions + 2 * sum(widths) + 512 * 10 + 10


def test_resnet_110_has_the_blocks_of_the_paper() -> None:
    model = build_model("resnet-110", CIFAR, 100, width=2)
    assert [len(stage) for stage in model.stages] == [3, 8, 40, 3]


def test_depthwise_layers_see_one_channel_each_and_every_one_has_a_scale() -> None:
    """A stem and 13 separable layers; a channel's scale ends where the next 1×1 convolution mixes it."""
    model = build_model("depthwise", CIFAR, 10, width=4)
    alone = [m for m in weights(model, nn.Conv2d) if m.groups > 1]
    assert [m.groups for m in alone] == [4, 4, 4, 8, 8, 8, *[16] * 6, 32]
    assert all(m.groups == m.in_channels == m.out_channels for m in alone)
    assert len(weights(model)) == 2 * len(alone) + 2 == 28
    assert sum(m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d)) == analyze(model).H


def test_mlps_have_no_biases_and_he_initialisation() -> None:
    torch.manual_seed(0)
    model = mlp((1, 28, 28), 10, (400, 300))
    layers = weights(model)
    assert [tuple(m.weight.shape) for m in layers] == [(400, 784), (300, 400), (10, 300)]
    assert all(m.bias is None for m in layers)
    for m in layers[:2]:
        n = m.weight.numel()
        assert m.weight.std().item() == pytest.approx(math.sqrt(2 / m.in_features), rel=5 / math.sqrt(2 * n))


def test_digits_cnn_fits_8_by_8_images_and_odd_ones() -> None:
    for side in (7, 8, 9):
        assert build_model("cnn", (1, side, side), 10, width=4)(torch.zeros(1, 1, side, side)).shape == (1, 10)


def test_chains_that_end_at_the_stages_leave_stem_and_head_alone() -> None:
    """What the authors' code does: stem and linear layer touch no unit, no chain leaves its stage."""
    model = build_model("plain-34", CIFAR, 10, width=2)
    ends = stage_ends(model)
    assert ends == ("stem", "stages.0", "stages.1", "stages.2", "stages.3")
    pinned, free = analyze(model, pin=ends), analyze(model)
    widths = [2] * 7 + [4] * 8 + [8] * 12 + [16] * 6
    assert free.H_paper == sum(widths)
    assert pinned.H_paper == sum(widths) - (2 + 2 + 4 + 8 + 16)
    touched = {e.name: bool(e.head.any() | e.tail.any()) for e in pinned.transparent}
    assert not touched.get("stem.conv.weight", False)
    assert not touched.get("linear.weight", False)
    assert touched["stages.1.0.conv.weight"]


def test_networks_without_stages_have_no_ends() -> None:
    assert stage_ends(build_model("mlp", CIFAR, 10)) == ()
    assert stage_ends(build_model("cnn", CIFAR, 10)) == ()


def test_a_recipe_takes_the_exact_rule_for_batch_norm() -> None:
    """γ is the unit's fixed weight and stands still; the rows in front of it move."""
    torch.manual_seed(0)
    model = build_model("resnet-10", (1, 8, 8), 10, width=4)
    recipe = Recipe(model="resnet-10", width=4, optimizer="gsgd", batch_norm="exact", iterations=1)
    x = torch.randn(8, 1, 8, 8)
    optimizer = build_optimizer(model, recipe, 0.1, x)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(x).square().mean().backward()
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    norms = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    rows = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    assert rows <= moved
    assert len(norms - moved) > 0
