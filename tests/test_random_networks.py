"""Random networks: whatever the grammar draws, the units that `analyze` finds can be rescaled by e^N(0, 1).

Half on vectors, half on images: 40 networks, 500 with --hypothesis-profile=many (`make test-all`).
"""

import torch
from hypothesis import HealthCheck, event, given, settings
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import gspace
from grammar import Network, build, networks, shape
from invariance import outputs, randomize_, relative_change, set_eps_

BATCH = 6
drawn = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
)


def inputs(network: Network, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    return (torch.randn(BATCH, *shape(network), generator=torch.Generator().manual_seed(seed)).to(dtype),)


def made(network: Network, dtype: torch.dtype, eps: float = 1e-5) -> nn.Module:
    torch.manual_seed(0)
    model = set_eps_(randomize_(build(network), seed=0).to(dtype), eps).train()
    with torch.no_grad():
        for seed in (10, 11):
            model(*inputs(network, dtype, seed))
    return model


def well_conditioned(model: nn.Module, x: tuple[Tensor, ...]) -> bool:
    """Whether every BatchNorm reads channels that vary over the batch by more than 1e-3 of their size.

    A constant channel (all its inputs dead) is rounding errors divided by √ε: at ε = 1e-30 that is noise, not a value.
    """
    varies = []

    def look(module: nn.Module, args: tuple[Tensor]) -> None:
        channels = args[0].transpose(0, 1).flatten(1)
        varies.append(bool((channels.var(1) > 1e-6 * channels.square().mean(1)).all()))

    hooks = [m.register_forward_pre_hook(look) for m in model.modules() if isinstance(m, _BatchNorm)]
    outputs(model, x, training=True)
    for hook in hooks:
        hook.remove()
    return all(varies)


def change(model: nn.Module, x: tuple[Tensor, ...], found: gspace.Analysis, absorbed: bool, training: bool) -> float:
    before = outputs(model, x, training)
    scales = gspace.random_scales(model, torch.Generator().manual_seed(1), absorbed=absorbed, analysis=found)
    gspace.rescale_(model, scales, analysis=found)
    after = outputs(model, x, training)
    gspace.rescale_(model, scales.inverse(), analysis=found)
    return relative_change(before, after)


def check(network: Network) -> None:
    """The claims made for the zoo, at its limits; an example input may release units and never takes one away."""
    symbolic = gspace.analyze(build(network), residual=network.residual)
    found = gspace.analyze(build(network), inputs(network, torch.float32, 0), residual=network.residual)
    assert (found.H, found.H_absorbed, found.H_paper) >= (symbolic.H, symbolic.H_absorbed, symbolic.H_paper)
    event(f"units: {'some' if found.H else 'none'}, absorbed: {'some' if found.H_absorbed else 'none'}")

    x, model = inputs(network, torch.float64, 0), made(network, torch.float64)
    for training in (True, False):
        assert change(model, x, symbolic, absorbed=False, training=training) < 1e-9
        assert change(model, x, found, absorbed=False, training=training) < 1e-9
    if not well_conditioned(model, x):
        event("a BatchNorm reads a constant channel")
        return
    tiny = made(network, torch.float64, eps=1e-30)
    if well_conditioned(tiny, x):
        for training in (True, False):
            assert change(tiny, x, found, absorbed=True, training=training) < 1e-9
    x, model = inputs(network, torch.float32, 0), made(network, torch.float32)
    for training, limit in ((True, 1e-3), (False, 1e-4)):
        assert change(model, x, found, absorbed=False, training=training) < limit


@drawn
@given(networks("vector"))
def test_networks_on_vectors(network: Network) -> None:
    check(network)


@drawn
@given(networks("image"))
def test_networks_on_images(network: Network) -> None:
    check(network)
