"""What the training loop trains: one network, or several small ones at once as stacked weights.

Both take rows `(network, batch, 1 + draws)` (see transform.py), add the loss and the number of errors of each batch to
`totals` `(network, 2)` on the device, and never wait for the device in `step`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gspace.lab.engine import Engine, Tree, autocast, compiled
from gspace.lab.models import build_model
from gspace.lab.optimizers import INITS, OPTIMIZERS, held_entries, hold
from gspace.lab.recipe import Recipe
from gspace.lab.seeds import derive
from gspace.lab.stacked import STACKED, stack_parameters
from gspace.lab.transform import Feed

EVALUATION_BATCH = 2_000

Score = tuple[float, float]  # mean loss, fraction of errors


class Learner(Protocol):
    """What the loop asks of the thing it trains."""

    kind: str
    totals: Tensor

    def step(self, rows: Tensor) -> None: ...
    def set_rates(self, rates: Sequence[float]) -> None: ...
    def test(self) -> list[Score]: ...
    def fit(self) -> list[Score]: ...
    def live(self) -> Tree: ...
    def clear(self) -> None: ...
    def state(self, network: int) -> dict[str, Any]: ...
    def load(self, network: int, state: Mapping[str, Any]) -> None: ...


def initial_model(recipe: Recipe, feed: Feed) -> nn.Module:
    """The network at iteration 0, on the CPU: the same on every machine and for every optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(recipe.seed, "init"))
        model = build_model(recipe.model, feed.shape, feed.classes, hidden=recipe.hidden, width=recipe.width)
    INITS[recipe.init](model, recipe)
    return model


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
    x, y = finish(take(images, rows)), labels[rows[..., 0]]
    if x.is_cuda:
        x = x.contiguous(memory_format=torch.channels_last)
    with autocast(precision, x.device):
        scores = model(x)
    scores = scores.float()
    return F.cross_entropy(scores, y), (scores.detach().argmax(1) != y).sum()


class Single:
    """One network of any kind with any optimizer of the table."""

    kind = "single"

    def __init__(self, recipe: Recipe, feed: Feed, engine: Engine) -> None:
        device = torch.device(engine.device)
        self.recipe, self.feed = recipe, feed
        self.model = initial_model(recipe, feed)
        held = held_entries(self.model, recipe)
        if device.type == "cuda":  # NHWC: the layout of the tensor cores
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.to(device)
        rate = torch.tensor(recipe.lr, device=device) if device.type == "cuda" else recipe.lr
        self.optimizer = OPTIMIZERS[recipe.optimizer](self.model, recipe, rate)
        self.restore_held = hold(self.model, held)
        self.totals = torch.zeros(1, 2, dtype=torch.float64, device=device)
        self.loss_total, self.error_total = self.totals[0]
        self.measure = compiled(loss_and_errors, _code(recipe, feed)) if engine.compile else loss_and_errors
        self.model.train()

    def step(self, rows: Tensor) -> None:
        feed = self.feed
        self.optimizer.zero_grad(set_to_none=True)
        loss, errors = self.measure(
            self.model, feed.images, feed.labels, feed.augment.take, feed.finish, rows[0], self.recipe.precision
        )
        loss.backward()
        self.optimizer.step()
        self.restore_held()
        self.loss_total.add_(loss.detach())
        self.error_total.add_(errors)

    def set_rates(self, rates: Sequence[float]) -> None:
        (rate,) = rates
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def test(self) -> list[Score]:
        return [self._score(_test_batches(self.feed))]

    def fit(self) -> list[Score]:
        return [self._score(_training_batches(self.feed))]

    @torch.no_grad()
    def _score(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Score:
        self.model.eval()
        total, errors = torch.zeros_like(self.totals[0])
        count = 0
        for x, y in batches:
            with autocast(self.recipe.precision, x.device):
                scores = self.model(x)
            scores = scores.float()
            total += F.cross_entropy(scores, y, reduction="sum")
            errors += (scores.argmax(1) != y).sum()
            count += len(y)
        self.model.train()
        return float(total) / count, float(errors) / count

    def live(self) -> Tree:
        return [dict(self.model.state_dict()), self.optimizer.state_dict(), self.totals]

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def state(self, network: int) -> dict[str, Any]:
        return {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}

    def load(self, network: int, state: Mapping[str, Any]) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # a loaded tensor may lie on another device; the loop sets the value


class Stacked:
    """MLPs of one shape, each with its own seed and learning rate, as weights `(network, out, in)`.

    The networks share nothing but the calls: each sees the batches it would see alone and follows the same arithmetic,
    up to the order of summation inside a matrix product.
    """

    kind = "stacked"

    def __init__(self, recipes: Sequence[Recipe], feed: Feed, engine: Engine) -> None:
        device = torch.device(engine.device)
        self.recipe, self.feed = recipes[0], feed
        models = [initial_model(recipe, feed) for recipe in recipes]
        self.parameters = stack_parameters(models, device)
        self.rates = torch.tensor([recipe.lr for recipe in recipes], device=device)
        self.optimizer = STACKED[self.recipe.optimizer](models, self.parameters, recipes, self.rates)
        self.totals = torch.zeros(len(recipes), 2, dtype=torch.float64, device=device)
        self.loss_totals, self.error_totals = self.totals.unbind(1)

    def scores(self, x: Tensor) -> Tensor:
        """Class scores `(network, batch, class)` of inputs `(network or 1, batch, ...)`."""
        *hidden, last = self.parameters.values()
        with autocast(self.recipe.precision, x.device):
            h = x.flatten(2)
            for weight in hidden:
                h = torch.matmul(h, weight.mT).relu()
            h = torch.matmul(h, last.mT)
        return h.float()

    def step(self, rows: Tensor) -> None:
        self.clear()
        x, y = self.feed.batch(rows)
        scores = self.scores(x)
        losses = F.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)
        losses.sum().backward()
        self.optimizer.step()
        self.loss_totals.add_(losses.detach())
        self.error_totals.add_((scores.detach().argmax(2) != y).sum(1))

    def set_rates(self, rates: Sequence[float]) -> None:
        self.rates.copy_(torch.tensor(rates))

    def test(self) -> list[Score]:
        return self._score(_test_batches(self.feed))

    def fit(self) -> list[Score]:
        return self._score(_training_batches(self.feed))

    @torch.no_grad()
    def _score(self, batches: Iterator[tuple[Tensor, Tensor]]) -> list[Score]:
        totals, count = torch.zeros_like(self.totals), 0
        for x, y in batches:
            scores = self.scores(x[None])
            many = y.expand(len(totals), -1)
            loss = F.cross_entropy(scores.flatten(0, 1), many.flatten(), reduction="none").view(many.shape)
            totals[:, 0] += loss.sum(1)
            totals[:, 1] += (scores.argmax(2) != y).sum(1)
            count += len(y)
        return [(loss / count, errors / count) for loss, errors in totals.tolist()]

    def live(self) -> Tree:
        return [self.parameters, self.optimizer.tensors(), self.totals]

    def clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self, network: int) -> dict[str, Any]:
        weights = {name: parameter[network].detach().clone() for name, parameter in self.parameters.items()}
        return {"model": weights, "optimizer": self.optimizer.state(network)}

    @torch.no_grad()
    def load(self, network: int, state: Mapping[str, Any]) -> None:
        for name, parameter in self.parameters.items():
            parameter[network].copy_(state["model"][name])
        self.optimizer.load(network, state["optimizer"])


def _test_batches(feed: Feed) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(feed.x_test.split(EVALUATION_BATCH), feed.y_test.split(EVALUATION_BATCH), strict=True)


def _training_batches(feed: Feed) -> Iterator[tuple[Tensor, Tensor]]:
    """The training images as they are, without augmentation."""
    for rows in feed.still_rows().split(EVALUATION_BATCH):
        yield feed.batch(rows)


def _code(recipe: Recipe, feed: Feed) -> tuple[Any, ...]:
    """All that decides the compiled code of a run's forward and backward pass."""
    sizes = (feed.images.shape, feed.classes, recipe.batch_size, recipe.hidden, recipe.width)
    return (recipe.model, recipe.precision, recipe.inputs, recipe.augment, *sizes)
