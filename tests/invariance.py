"""How far a rescaling moves a network: the measure all tests of the symmetry share.

A network is put where nothing is trivial: weights of He's size, so that the signal reaches the output and a wrong scale
shows; every bias, γ and β away from 0 and 1; running statistics of real batches.
"""

import torch
from torch import Tensor, nn

import gspace
from cases import Case

BATCH = 8


def randomize_(model: nn.Module, seed: int) -> nn.Module:
    """Weights N(0, 2/fan-in), vectors 0.3·N(0, 1) and, where they multiply (γ, slopes), 1 or 0.25 more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                if parameter.dim() > 1:
                    parameter.copy_(noise * (2 / parameter[0].numel()) ** 0.5)
                else:
                    centre = 0.25 if isinstance(module, nn.PReLU) else float("norm" in type(module).__name__.lower())
                    parameter.copy_(0.3 * noise + centre * (name == "weight"))
    return model


def draw_inputs(case: Case, seed: int, dtype: torch.dtype, batch: int = BATCH) -> tuple[Tensor, ...]:
    """A batch for every input of the case."""
    generator = torch.Generator().manual_seed(seed)
    if case.vocabulary:
        return tuple(torch.randint(case.vocabulary, (batch, *shape), generator=generator) for shape in case.shapes)
    return tuple(torch.randn(batch, *shape, generator=generator).to(dtype) for shape in case.shapes)


def set_eps_(model: nn.Module, eps: float) -> nn.Module:
    """Every norm with this ε."""
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = eps
    return model


def build(case: Case, dtype: torch.dtype = torch.float64, eps: float | None = None, seed: int = 0) -> nn.Module:
    """The case's network, randomized, with running statistics of three batches."""
    torch.manual_seed(seed)
    model = randomize_(case.build(), seed).to(dtype)
    if eps is not None:
        set_eps_(model, eps)
    model.train()
    with torch.no_grad():
        for step in range(3):
            model(*draw_inputs(case, 100 + step, dtype))
    return model


def analyze(case: Case) -> gspace.Analysis:
    """The analysis of a fresh network of the case."""
    return gspace.analyze(case.build(), draw_inputs(case, 0, torch.float32, batch=2), residual=case.residual)


def outputs(model: nn.Module, inputs: tuple[Tensor, ...], training: bool, seed: int = 0) -> Tensor:
    """The output in the given mode; dropout is seeded, and running statistics are what they were before."""
    before = [buffer.clone() for buffer in model.buffers()]
    torch.manual_seed(seed)
    with torch.no_grad():
        result = model.train(training)(*inputs)
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    return result


def relative_change(before: Tensor, after: Tensor) -> float:
    """max |after − before| / max |before|; infinite where a value is not finite."""
    change = ((after - before).abs().max() / before.abs().max()).item()
    return change if change == change else float("inf")
