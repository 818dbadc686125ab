"""Several MLPs of one shape as one network, so that an optimizer trains them all at once.

K MLPs side by side are a network of convolutions with K groups: the same function, units and paths, which gspace traces
like any other. Its weights `(K·out, in, 1)` are K matrices one below the other, and a batched matrix product computes
the forward pass faster than a grouped convolution does.

Each network has its own learning rate. The loss of network k is weighted by lr_k / lr, where lr is the optimizer's.
Gradients and momentum are linear in that weight and all rates follow one schedule, so network k moves as with lr_k.
Weight decay is not: with it, the rates of a stack must be equal.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gspace.lab.recipe import Recipe

# Not path-sgd: it measures all weights of a layer by one exponent, so a network that diverges would spoil the others.
STACKABLE = ("sgd", "sgd-frozen", "gsgd")


def stackable(recipe: Recipe) -> bool:
    """Whether several such runs can be trained at once."""
    return recipe.model == "mlp" and recipe.optimizer in STACKABLE


def stack_key(recipe: Recipe) -> Recipe:
    """Runs with the same key can be one stack: they differ in seed and, without weight decay, in learning rate."""
    return recipe.but(seed=0) if recipe.weight_decay else recipe.but(seed=0, lr=1.0)


def stack(models: Sequence[nn.Module]) -> nn.Sequential:
    """The networks side by side, from `(batch, K·in, 1)` to `(batch, K·classes, 1)`; layers keep their names."""
    count = len(models)
    stacked = nn.Sequential()
    for name, layers in zip(
        dict(models[0].named_children()), zip(*(m.children() for m in models), strict=True), strict=True
    ):
        first = layers[0]
        if isinstance(first, nn.Linear):
            inputs, outputs = first.in_features, first.out_features
            layer = nn.Conv1d(count * inputs, count * outputs, 1, groups=count, bias=False)
            with torch.no_grad():
                layer.weight.copy_(torch.cat([linear.weight for linear in layers])[..., None])
            stacked.add_module(name, layer)
        elif isinstance(first, nn.ReLU):
            stacked.add_module(name, nn.ReLU())
    return stacked


def matrices(stacked: nn.Module, count: int) -> list[Tensor]:
    """The weights of each layer, `(network, out, in)`, without a copy."""
    return [weight.view(count, -1, weight.shape[1]) for weight in stacked.parameters()]


def scores(stacked: nn.Module, x: Tensor, count: int) -> Tensor:
    """Class scores `(network, batch, class)` of inputs `(network or 1, batch, ...)`."""
    *hidden, last = matrices(stacked, count)
    h = x.flatten(2)
    for weight in hidden:
        h = torch.matmul(h, weight.mT).relu()
    return torch.matmul(h, last.mT)
