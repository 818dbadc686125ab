"""Several MLPs of one shape as one network, so that an optimizer trains them all at once.

K MLPs side by side are a network of convolutions with K groups: the same function, units and paths, which gspace traces
like any other. Its weights `(K·out, in, 1)` are K matrices one below the other, and a batched matrix product computes
the forward pass faster than a grouped convolution does.

Each network has its own learning rate. The loss of network k is weighted by lr_k / lr, where lr is the optimizer's.
Gradients and momentum are linear in that weight and all rates follow one schedule, so network k moves as with lr_k.
Weight decay is not: with it, the rates of a stack must be equal.
"""

import math
import sys
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from gspace.lab.data import SETS
from gspace.lab.engine import at_least_float32
from gspace.lab.recipe import Recipe
from gspace.lab.transform import input_shape

# Not path-sgd: it measures all weights of a layer by one exponent, so a network that diverges would spoil the others.
STACKABLE = ("sgd", "sgd-frozen", "gsgd")


def stackable(recipe: Recipe) -> bool:
    """Whether several such runs can be trained at once."""
    return recipe.model == "mlp" and recipe.optimizer in STACKABLE


def stack_key(recipe: Recipe) -> Recipe:
    """Runs with the same key can be one stack: they differ in seed and, without weight decay, in learning rate."""
    return recipe.but(seed=0) if recipe.weight_decay else recipe.but(seed=0, lr=1.0)


# Weights of a stack on a CPU: what its cache holds. Five [49:512:512:10] (6 MB) still gain (docs/stack.md); five
# [49:1024:1024:10] (22 MB) are trained one by one.
CACHE = 8 << 20


def largest_stack(recipe: Recipe, device: str) -> int:
    """How many such networks train faster together than one after the other."""
    if device != "cpu":
        return sys.maxsize
    inputs = math.prod(input_shape(recipe.data, recipe.inputs))
    weights = sum(a * b for a, b in pairwise((inputs, *recipe.hidden, SETS[recipe.data].classes)))
    return max(1, CACHE // (4 * weights))


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
            layer = nn.Conv1d(count * inputs, count * outputs, 1, groups=count, bias=False, dtype=first.weight.dtype)
            with torch.no_grad():
                layer.weight.copy_(torch.cat([linear.weight for linear in layers])[..., None])
            stacked.add_module(name, layer)
        elif isinstance(first, nn.ReLU):
            stacked.add_module(name, nn.ReLU())
    return stacked


def matrices(stacked: nn.Module, count: int) -> list[Tensor]:
    """The weights of each layer, `(network, out, in)`, without a copy and outside of autograd."""
    return [weight.detach().view(count, -1, weight.shape[1]) for weight in stacked.parameters()]


def activations(weights: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """Inputs `(network, batch, in)`, then what each layer makes of them; the last are the class scores."""
    *hidden, last = weights
    h = [x]
    for weight in hidden:
        h.append(torch.bmm(h[-1], weight.mT).relu_())
    return [*h, torch.bmm(h[-1], last.mT)]


def losses_and_gradients(
    weights: Sequence[Tensor], x: Tensor, y: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss ℓ and number of errors of each network, and the gradients of Σ_k scale_k·ℓ_k.

    Backpropagation written out, because for small networks autograd's own work is most of an iteration:
        ∂/∂z = (softmax z − onehot y)·scale/batch,  ∂/∂W = (∂/∂z)ᵀ h,  ∂/∂h = (∂/∂z) W where h > 0.
    """
    *inputs, scores = activations(weights, x)
    scores = at_least_float32(scores)
    log_p = scores.log_softmax(2)
    label = y.unsqueeze(2)
    losses = log_p.gather(2, label).mean((1, 2)).neg_()
    errors = (scores.argmax(2) != y).sum(1)
    g = log_p.exp_().scatter_add_(2, label, torch.full_like(label, -1, dtype=log_p.dtype))
    g = g.mul_((scale / y.shape[1]).view(-1, 1, 1)).to(inputs[-1].dtype)
    grads = []
    for weight, h in zip(reversed(weights), reversed(inputs), strict=True):
        grads.append(torch.bmm(g.mT, h).to(weight.dtype))
        if h is not inputs[0]:
            g = torch.ops.aten.threshold_backward(torch.bmm(g, weight), h, 0)
    return losses, errors, grads[::-1]
