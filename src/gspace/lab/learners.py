"""What the training loop trains: one network, or several small ones at once as stacked weights.

Both take rows `(network, batch, 1 + draws)` (see transform.py), add the loss and the number of errors of each batch to
`totals` `(network, 2)` on the device, and never wait for the device in `step`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from gspace.lab.engine import Engine, Tree, at_least_float32, autocast, compiled, number_type
from gspace.lab.models import build_model
from gspace.lab.optimizers import INITS, build_optimizer
from gspace.lab.recipe import Recipe
from gspace.lab.seeds import derive
from gspace.lab.stacked import activations, losses_and_gradients, matrices, stack
from gspace.lab.transform import Feed

EVALUATION_BATCH = 2_000

Score = tuple[float, float]  # mean loss, fraction of errors


class Learner(Protocol):
    """What the loop asks of the thing it trains."""

    kind: str
    model: nn.Module
    optimizer: Optimizer
    totals: Tensor

    def step(self, rows: Tensor) -> None: ...
    def set_rates(self, rates: Sequence[float]) -> None: ...
    def score(self, batches: Iterator[tuple[Tensor, Tensor]]) -> list[Score]: ...


def live(learner: Learner) -> Tree:
    """Everything that a step writes to."""
    return [dict(learner.model.state_dict()), learner.optimizer.state_dict(), learner.totals]


def state_of(learner: Learner) -> dict[str, Any]:
    """What a checkpoint holds of it."""
    return {"model": dict(learner.model.state_dict()), "optimizer": learner.optimizer.state_dict()}


def load_state(learner: Learner, state: Mapping[str, Any]) -> None:
    rates = [group["lr"] for group in learner.optimizer.param_groups]
    learner.model.load_state_dict(state["model"])
    learner.optimizer.load_state_dict(state["optimizer"])
    for group, rate in zip(learner.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # a loaded tensor may lie on another device; the loop sets the value


def initial_model(recipe: Recipe, feed: Feed) -> nn.Module:
    """The network at iteration 0, on the CPU: the same on every machine and for every optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(recipe.seed, "init"))
        model = build_model(recipe.model, feed.shape, feed.classes, hidden=recipe.hidden, width=recipe.width)
    INITS[recipe.init](model, recipe)
    return model.to(number_type(recipe.precision))


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
    """Images as the tensor cores want them, channels last; on a CPU as they are."""
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x


class Single:
    """One network of any kind with any optimizer of the table."""

    kind = "single"

    def __init__(self, recipe: Recipe, feed: Feed, engine: Engine) -> None:
        device = torch.device(engine.device)
        self.recipe, self.feed = recipe, feed
        self.model = initial_model(recipe, feed)
        self.model.to(device)
        if device.type == "cuda":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        example = feed.x_test.new_zeros(1, *feed.shape)
        self.optimizer = build_optimizer(self.model, recipe, _rate(recipe.lr, device), example)
        self.totals = torch.zeros(1, 2, dtype=torch.float64, device=device)
        self.loss_total, self.error_total = self.totals[0]
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
            self.loss_total.fill_(torch.nan)
        self.loss_total.add_(loss.detach())
        self.error_total.add_(errors)

    def set_rates(self, rates: Sequence[float]) -> None:
        _set_rate(self.optimizer, rates[0])

    @torch.no_grad()
    def score(self, batches: Iterator[tuple[Tensor, Tensor]]) -> list[Score]:
        self.model.eval()
        total, errors = torch.zeros_like(self.totals[0])
        count = 0
        for x, y in batches:
            with autocast(self.recipe.precision, x.device):
                found = self.model(_laid_out(x))
            found = at_least_float32(found)
            total += F.cross_entropy(found, y, reduction="sum")
            errors += (found.argmax(1) != y).sum()
            count += len(y)
        self.model.train()
        return [(float(total) / count, float(errors) / count)]


class Stacked:
    """MLPs of one shape, each with its own seed and learning rate, as one network (stacked.py).

    They share nothing but the calls: each sees the batches it would see alone and follows the same arithmetic, up to
    the order of summation inside a matrix product. One that diverges stands still and does not disturb the others.
    """

    kind = "stacked"

    def __init__(self, recipes: Sequence[Recipe], feed: Feed, engine: Engine) -> None:
        device = torch.device(engine.device)
        self.recipe, self.feed, self.count = recipes[0], feed, len(recipes)
        self.model: nn.Module = stack([initial_model(recipe, feed) for recipe in recipes]).to(device)
        self.reference = max(range(self.count), key=lambda k: recipes[k].lr)  # its rate is the optimizer's
        largest = recipes[self.reference].lr
        scales = [recipe.lr / largest if largest else 1.0 for recipe in recipes]
        self.weights = torch.tensor(scales, dtype=feed.x_test.dtype, device=device)
        example = feed.x_test.new_zeros(1, self.count * math.prod(feed.shape), 1)
        self.optimizer = build_optimizer(self.model, self.recipe, _rate(largest, device), example)
        self.totals = torch.zeros(self.count, 2, dtype=torch.float64, device=device)
        self.loss_totals, self.error_totals = self.totals.unbind(1)
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
        grads = [
            parameter.grad.view(self.count, -1) for parameter in self.model.parameters() if parameter.grad is not None
        ]
        finite = torch.stack([grad.isfinite().all(1) for grad in grads]).all(0)
        for grad in grads:
            grad.copy_(torch.where(finite[:, None], grad, 0))
        self.loss_totals.copy_(torch.where(finite, self.loss_totals, torch.nan))

    def set_rates(self, rates: Sequence[float]) -> None:
        _set_rate(self.optimizer, rates[self.reference])

    @torch.no_grad()
    def score(self, batches: Iterator[tuple[Tensor, Tensor]]) -> list[Score]:
        totals, count = torch.zeros_like(self.totals), 0
        for x, y in batches:
            with autocast(self.recipe.precision, x.device):
                found = at_least_float32(activations(self.matrices, x.flatten(1).expand(self.count, -1, -1))[-1])
            many = y.expand(self.count, -1)
            loss = F.cross_entropy(found.flatten(0, 1), many.flatten(), reduction="none").view(many.shape)
            totals[:, 0] += loss.sum(1)
            totals[:, 1] += (found.argmax(2) != y).sum(1)
            count += len(y)
        return [(loss / count, errors / count) for loss, errors in totals.tolist()]


def _rate(value: float, device: torch.device) -> float | Tensor:
    """The learning rate; on a GPU in a tensor, so that a captured step follows the schedule."""
    return torch.tensor(value, device=device) if device.type == "cuda" else value


def _set_rate(optimizer: Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


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


def test_images(feed: Feed) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(feed.x_test.split(EVALUATION_BATCH), feed.y_test.split(EVALUATION_BATCH), strict=True)


def training_images(feed: Feed) -> Iterator[tuple[Tensor, Tensor]]:
    """The training images as they are, without augmentation."""
    for rows in feed.still_rows().split(EVALUATION_BATCH):
        yield feed.batch(rows)


def code_key(recipe: Recipe) -> Recipe:
    """All of a recipe that decides the compiled code of its forward and backward pass; the rest at its default."""
    names = "data model hidden width precision inputs augment batch_size train_size validation".split()
    return Recipe(epochs=1.0, **{name: getattr(recipe, name) for name in names})
