"""What the training loop trains: one network, or several MLPs of one shape at once as stacked weights.

Both take rows `(network, batch, 1 + draws)` (see transform.py), add the loss and the number of errors of each batch to
`totals` `(network, 2)` on the device, and never wait for the device in `step`.

K MLPs side by side are a network of convolutions with K groups: the same function, units and paths, which gspace traces
like any other. Its weights `(K·out, in, 1)` are K matrices one below the other, and a batched matrix product computes
the forward pass faster than a grouped convolution does.

Each network has its own learning rate. The loss of network k is weighted by lr_k / lr, where lr is the optimizer's.
Gradients and momentum are linear in that weight and all rates follow one schedule, so network k moves as with lr_k.
Weight decay is not: with it, the rates of a stack must be equal.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from gspace.lab.data import SETS
from gspace.lab.engine import Engine, Tree, at_least_float32, autocast, compiled, number_type
from gspace.lab.models import INITS, build_model, build_optimizer
from gspace.lab.recipe import Recipe
from gspace.lab.seeds import derive
from gspace.lab.transform import Feed, input_shape

Score = tuple[float, float]  # mean loss, fraction of errors
Batches = Iterator[tuple[Tensor, Tensor]]

# Not path-sgd: it measures all weights of a layer by one exponent, so a network that diverges would spoil the others.
STACKABLE = ("sgd", "sgd-frozen", "gsgd")

# Weights of a stack on a CPU: what its cache holds. Five [49:512:512:10] (6 MB) still gain (docs/stack.md); five
# [49:1024:1024:10] (22 MB) are trained one by one.
CACHE = 8 << 20


def stackable(recipe: Recipe) -> bool:
    return recipe.model == "mlp" and recipe.optimizer in STACKABLE


def stack_key(recipe: Recipe) -> Recipe:
    """Runs with the same key can be one stack: they differ in seed and, without weight decay, in learning rate."""
    return recipe.but(seed=0) if recipe.weight_decay else recipe.but(seed=0, lr=1.0)


def stack_or_run(recipe: Recipe) -> Recipe:
    """What a run is trained as: part of a stack, or by itself."""
    return stack_key(recipe) if stackable(recipe) else recipe


def batches(recipes: Sequence[Recipe], largest: int = 16) -> Iterator[list[Recipe]]:
    """Runs to be taken together: neighbours that can be stacked, at most `largest`; all others alone."""
    for key, group in groupby(recipes, key=stack_or_run):
        members = list(dict.fromkeys(group))
        size = largest if stackable(key) else 1
        for start in range(0, len(members), size):
            yield members[start : start + size]


def largest_stack(recipe: Recipe, device: str) -> int:
    """How many such networks train faster together than one after the other."""
    if device != "cpu":
        return sys.maxsize
    return max(1, CACHE // (4 * mlp_weights(recipe)))


def mlp_weights(recipe: Recipe) -> int:
    """m of an MLP, which has no biases."""
    inputs = math.prod(input_shape(recipe.data, recipe.inputs))
    return sum(a * b for a, b in pairwise((inputs, *recipe.hidden, SETS[recipe.data].classes)))


def network(recipe: Recipe) -> nn.Module:
    """The network of a recipe, with weights drawn from torch's global generator."""
    shape, classes = input_shape(recipe.data, recipe.inputs), SETS[recipe.data].classes
    return build_model(recipe.model, shape, classes, hidden=recipe.hidden, width=recipe.width)


def initial_model(recipe: Recipe) -> nn.Module:
    """The network at iteration 0, on the CPU: the same on every machine and for every optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(recipe.seed, "init"))
        model = network(recipe)
    for change in INITS[recipe.init]:
        change(model, recipe)
    return model.to(number_type(recipe.precision))


class _Learner:
    """What both kinds have: a network, its optimizer, and the sums of losses and errors since the last point."""

    def __init__(
        self, recipes: Sequence[Recipe], feed: Feed, engine: Engine, model: nn.Module, example: Tensor
    ) -> None:
        device = torch.device(engine.device)
        self.recipe, self.feed, self.model, self.count = recipes[0], feed, model.to(device), len(recipes)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.reference = max(range(self.count), key=lambda k: recipes[k].lr)  # its rate is the optimizer's
        lr = recipes[self.reference].lr
        rate = torch.tensor(lr, device=device) if device.type == "cuda" else lr  # a captured step reads a tensor
        self.optimizer = build_optimizer(self.model, self.recipe, rate, example)
        self.totals = torch.zeros(self.count, 2, dtype=torch.float64, device=device)
        self.loss_totals, self.error_totals = self.totals.unbind(1)

    def outputs(self, x: Tensor) -> Tensor:
        """Class scores of inputs `(batch, channel, height, width)`, `(network, batch, class)`."""
        raise NotImplementedError

    @torch.no_grad()
    def score(self, batches: Batches) -> list[Score]:
        self.model.eval()
        totals, count = torch.zeros_like(self.totals), 0
        for x, y in batches:
            with autocast(self.recipe.precision, x.device):
                found = at_least_float32(self.outputs(x))
            many = y.expand(self.count, -1)
            loss = F.cross_entropy(found.flatten(0, 1), many.flatten(), reduction="none").view(many.shape)
            totals[:, 0] += loss.sum(1)
            totals[:, 1] += (found.argmax(2) != y).sum(1)
            count += len(y)
        self.model.train()
        return [(loss / count, errors / count) for loss, errors in totals.tolist()]

    def set_rates(self, rates: Sequence[float]) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rates[self.reference])
            else:
                group["lr"] = rates[self.reference]

    def live(self) -> Tree:
        """Everything that a step writes to."""
        return [dict(self.model.state_dict()), self.optimizer.state_dict(), self.totals]

    def state(self) -> dict[str, Any]:
        return {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # a loaded tensor may lie on another device; the loop sets the value


class Single(_Learner):
    """One network of any kind with any optimizer of the table."""

    kind = "single"

    def __init__(self, recipes: Sequence[Recipe], feed: Feed, engine: Engine) -> None:
        (recipe,) = recipes
        super().__init__(recipes, feed, engine, initial_model(recipe), torch.zeros_like(feed.x_test[:1]))
        self.measure = compiled(loss_and_errors, code_key(recipe)) if engine.compile else loss_and_errors
        self.model.train()

    def step(self, rows: Tensor) -> None:
        feed = self.feed
        self.optimizer.zero_grad()
        loss, errors = self.measure(
            self.model, feed.images, feed.labels, feed.augment.take, feed.finish, rows[0], self.recipe.precision
        )
        loss.backward()
        if not _moved(self.optimizer):
            self.loss_totals.fill_(torch.nan)
        self.loss_totals.add_(loss.detach())
        self.error_totals.add_(errors)

    def outputs(self, x: Tensor) -> Tensor:
        return self.model(_laid_out(x))[None]


def loss_and_errors(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    take: Callable[[Tensor, Tensor], Tensor],
    finish: Callable[[Tensor], Tensor],
    rows: Tensor,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """Mean loss and number of errors of one batch: all from stored pixels to the loss, in one compilable piece."""
    x, y = _laid_out(finish(take(images, rows))), labels[rows[..., 0]]
    with autocast(precision, x.device):
        found = model(x)
    found = at_least_float32(found)
    return F.cross_entropy(found, y), (found.detach().argmax(1) != y).sum()


def _laid_out(x: Tensor) -> Tensor:
    """Images as convolutions are fastest, on a GPU and on a CPU: channels last."""
    return x.contiguous(memory_format=torch.channels_last)


def code_key(recipe: Recipe) -> Recipe:
    """All of a recipe that decides the compiled code of its forward and backward pass; the rest at its default."""
    names = "data model hidden width precision inputs augment batch_size train_size validation".split()
    return Recipe(epochs=1.0, **{name: getattr(recipe, name) for name in names})


def _moved(optimizer: Optimizer) -> bool:
    """Takes a step; False if the optimizer refused it because a gradient is not finite."""
    try:
        optimizer.step()
    except RuntimeError:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if all(bool(grad.isfinite().all()) for grad in grads):
            raise
        return False
    return True


class Stacked(_Learner):
    """MLPs of one shape, each with its own seed and learning rate, as one network.

    They share nothing but the calls: each sees the batches it would see alone and follows the same arithmetic, up to
    the order of summation inside a matrix product. One that diverges stands still and does not disturb the others.
    """

    kind = "stacked"

    def __init__(self, recipes: Sequence[Recipe], feed: Feed, engine: Engine) -> None:
        model = stack([initial_model(recipe) for recipe in recipes])
        example = feed.x_test.new_zeros(1, len(recipes) * feed.x_test[0].numel(), 1)
        super().__init__(recipes, feed, engine, model, example)
        largest = recipes[self.reference].lr
        scales = [recipe.lr / largest if largest else 1.0 for recipe in recipes]
        self.weights = torch.tensor(scales, dtype=feed.x_test.dtype, device=self.totals.device)
        self.matrices = matrices(self.model, self.count)

    def step(self, rows: Tensor) -> None:
        x, y = self.feed.batch(rows)
        with autocast(self.recipe.precision, x.device):
            losses, errors, grads = losses_and_gradients(self.matrices, x.flatten(2), y, self.weights)
        for parameter, grad in zip(self.model.parameters(), grads, strict=True):
            parameter.grad = grad.view_as(parameter)
        # A GPU is not asked whether a gradient was refused: there the diverged are stilled before every step.
        if self.totals.is_cuda or not _moved(self.optimizer):
            self._still_diverged()
            self.optimizer.step()
        self.loss_totals.add_(losses)
        self.error_totals.add_(errors)

    @torch.no_grad()
    def _still_diverged(self) -> None:
        """Networks whose gradient is not finite: marks them in `totals` and makes their gradient 0."""
        grads = [p.grad.view(self.count, -1) for p in self.model.parameters() if p.grad is not None]
        finite = torch.stack([grad.isfinite().all(1) for grad in grads]).all(0)
        for grad in grads:
            grad.copy_(torch.where(finite[:, None], grad, 0))
        self.loss_totals.copy_(torch.where(finite, self.loss_totals, torch.nan))

    def outputs(self, x: Tensor) -> Tensor:
        return activations(self.matrices, x.flatten(1).expand(self.count, -1, -1))[-1]


Learner = Single | Stacked


def stack(models: Sequence[nn.Module]) -> nn.Sequential:
    """The networks side by side, from `(batch, K·in, 1)` to `(batch, K·classes, 1)`; layers keep their names."""
    count, stacked = len(models), nn.Sequential()
    for name, first in models[0].named_children():
        if isinstance(first, nn.Linear):
            inputs, outputs = first.in_features, first.out_features
            layer = nn.Conv1d(count * inputs, count * outputs, 1, groups=count, bias=False, dtype=first.weight.dtype)
            weights = [model.get_parameter(f"{name}.weight") for model in models]
            with torch.no_grad():
                layer.weight.copy_(torch.cat(tuple(weights))[..., None])
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
