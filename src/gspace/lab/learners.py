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
from dataclasses import dataclass
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


@dataclass(frozen=True, eq=False)
class Learner:
    """Networks in training, their optimizer, and the sums of losses and errors since the last point of the curve."""

    kind: str  # its name in `LEARNERS`
    recipe: Recipe  # of the first network; the others differ in seed and rate alone
    model: nn.Module
    optimizer: Optimizer
    rated: int  # the network whose learning rate is the optimizer's
    totals: Tensor
    step: Callable[[Tensor], None]  # takes the rows of an iteration
    outputs: Callable[[Tensor], Tensor]  # class scores `(network, batch, class)` of `(batch, channel, height, width)`

    @torch.no_grad()
    def score(self, batches: Batches) -> list[Score]:
        self.model.eval()
        totals, count = torch.zeros_like(self.totals), 0
        for x, y in batches:
            with autocast(self.recipe.precision, x.device):
                found = at_least_float32(self.outputs(x))
            many = y.expand(len(totals), -1)
            loss = F.cross_entropy(found.flatten(0, 1), many.flatten(), reduction="none").view(many.shape)
            totals[:, 0] += loss.sum(1)
            totals[:, 1] += (found.argmax(2) != y).sum(1)
            count += len(y)
        self.model.train()
        return [(loss / count, errors / count) for loss, errors in totals.tolist()]

    def set_rates(self, rates: Sequence[float]) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rates[self.rated])
            else:
                group["lr"] = rates[self.rated]

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


def _prepared(
    model: nn.Module, recipes: Sequence[Recipe], engine: Engine, example: Tensor
) -> tuple[Optimizer, int, Tensor]:
    """Moves the model to the device; its optimizer, the network with the largest rate, which it gets, and the sums."""
    device = torch.device(engine.device)
    model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    rated = max(range(len(recipes)), key=lambda k: recipes[k].lr)
    lr = recipes[rated].lr
    rate = torch.tensor(lr, device=device) if device.type == "cuda" else lr  # a captured step reads a tensor
    optimizer = build_optimizer(model, recipes[0], rate, example)
    return optimizer, rated, torch.zeros(len(recipes), 2, dtype=torch.float64, device=device)


def single(recipes: Sequence[Recipe], feed: Feed, engine: Engine) -> Learner:
    """One network of any kind with any optimizer of the table."""
    (recipe,) = recipes
    model = initial_model(recipe)
    optimizer, rated, totals = _prepared(model, recipes, engine, torch.zeros_like(feed.x_test[:1]))
    loss_sums, error_sums = totals.unbind(1)
    measure = compiled(loss_and_errors, code_key(recipe)) if engine.compile else loss_and_errors
    model.train()

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        loss, errors = measure(
            model, feed.images, feed.labels, feed.augment.take, feed.finish, rows[0], recipe.precision
        )
        loss.backward()
        if not _moved(optimizer):
            loss_sums.fill_(torch.nan)
        loss_sums.add_(loss.detach())
        error_sums.add_(errors)

    def outputs(x: Tensor) -> Tensor:
        return model(_laid_out(x))[None]

    return Learner("single", recipe, model, optimizer, rated, totals, step, outputs)


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


def stacked(recipes: Sequence[Recipe], feed: Feed, engine: Engine) -> Learner:
    """MLPs of one shape, each with its own seed and learning rate, as one network.

    They share nothing but the calls: each sees the batches it would see alone and follows the same arithmetic, up to
    the order of summation inside a matrix product. One that diverges stands still and does not disturb the others.
    """
    recipe, count = recipes[0], len(recipes)
    model = stack([initial_model(recipe) for recipe in recipes])
    example = feed.x_test.new_zeros(1, count * feed.x_test[0].numel(), 1)
    optimizer, rated, totals = _prepared(model, recipes, engine, example)
    loss_sums, error_sums = totals.unbind(1)
    largest = recipes[rated].lr
    shares = [recipe.lr / largest if largest else 1.0 for recipe in recipes]
    scale = torch.tensor(shares, dtype=feed.x_test.dtype, device=totals.device)
    weights = matrices(model, count)

    def step(rows: Tensor) -> None:
        x, y = feed.batch(rows)
        with autocast(recipe.precision, x.device):
            losses, errors, grads = losses_and_gradients(weights, x.flatten(2), y, scale)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad.view_as(parameter)
        # A GPU is not asked whether a gradient was refused: there the diverged are stilled before every step.
        if totals.is_cuda or not _moved(optimizer):
            _still_diverged(model, loss_sums)
            optimizer.step()
        loss_sums.add_(losses)
        error_sums.add_(errors)

    def outputs(x: Tensor) -> Tensor:
        return activations(weights, x.flatten(1).expand(count, -1, -1))[-1]

    return Learner("stacked", recipe, model, optimizer, rated, totals, step, outputs)


LEARNERS: Mapping[str, Callable[[Sequence[Recipe], Feed, Engine], Learner]] = {"single": single, "stacked": stacked}


@torch.no_grad()
def _still_diverged(stacked: nn.Module, loss_sums: Tensor) -> None:
    """Networks whose gradient is not finite: marks them in `loss_sums` and makes their gradient 0."""
    grads = [p.grad.view(len(loss_sums), -1) for p in stacked.parameters() if p.grad is not None]
    finite = torch.stack([grad.isfinite().all(1) for grad in grads]).all(0)
    for grad in grads:
        grad.copy_(torch.where(finite[:, None], grad, 0))
    loss_sums.copy_(torch.where(finite, loss_sums, torch.nan))


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
