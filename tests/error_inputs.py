"""What every optimizer of ours refuses, as data: calls that make one, weights and gradients at a step, states to load.

As `torch.testing._internal.common_optimizers` has it for torch's own. An entry names the kinds it is for; what it
says is a regular expression. `test_optimizer_errors.py` runs all of them.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrizations

import gspace
import zoo
from contract import KINDS, Kind, Net, chain

OURS = tuple(kind for kind in KINDS if kind.name != "SGD")


def _all(kind: Kind) -> bool:
    return True


def _gspace(kind: Kind) -> bool:
    return kind.gspace


def _skeleton(kind: Kind) -> bool:
    return kind.gspace or kind.name == "FrozenSkeletonSGD"


def _named(*names: str) -> Callable[[Kind], bool]:
    return lambda kind: kind.name in names


def _like(cls: type[torch.optim.Optimizer]) -> Callable[[Kind], bool]:
    return lambda kind: issubclass(kind.twin, cls)


# Making one -----------------------------------------------------------------------------------------------------------


class Made(NamedTuple):
    """A call that must raise before anything is made."""

    call: Callable[[Kind], Any]
    says: str
    to: Callable[[Kind], bool] = _all
    error: type[Exception] = ValueError


def _option(says: str, to: Callable[[Kind], bool] = _all, error: type[Exception] = ValueError, **options: Any) -> Made:
    return Made(lambda kind: kind.make(Net(), **options), says, to, error)


def _model(model: Callable[[], Any], says: str, error: type[Exception] = ValueError) -> Made:
    def call(kind: Kind) -> Any:
        return kind.build(model(), params=None, **kind.options)

    return Made(call, says, error=error)


def _in_inference() -> nn.Module:
    with torch.inference_mode():
        return chain()


def _around(inner: Any, says: str, error: type[Exception] = TypeError) -> Made:
    return Made(lambda kind: gspace.InGSpace(Net(), inner), says, _named("InGSpace-SGD"), error)


def _doubled(kind: Kind) -> Any:
    model = Net()
    return kind.make(model, [{"params": model.head.parameters()}, {"params": model.parameters()}])


SGD, ADAM = _like(torch.optim.SGD), _like(torch.optim.Adam)
GSGD = _named("GSGD", "GSGD-momentum")
MAKING: dict[str, Made] = {
    "lr": _option("learning rate", lr=-0.1),
    "lr nan": _option("lr|learning rate", lr=math.nan),
    "lr tensor nan": _option("lr|learning rate", lr=torch.tensor(math.nan)),
    "lr of two": _option("1-element", lr=torch.tensor([0.1, 0.1])),
    "decay": _option("weight_decay", weight_decay=-0.1),
    "momentum": _option("momentum", SGD, momentum=-0.1),
    "nesterov": _option("Nesterov", SGD, momentum=0.0, nesterov=True),
    "dampened nesterov": _option("Nesterov", SGD, momentum=0.9, dampening=0.1, nesterov=True),
    "betas": _option("beta", ADAM, betas=(1.5, 0.9)),
    "eps": _option("epsilon", ADAM, eps=-1.0),
    "alpha": _option("alpha", _like(torch.optim.RMSprop), alpha=-1.0),
    "unknown": _option("unexpected keyword", learning_rate=0.1, error=TypeError),
    "reference": _option("reference must be one of None, 'one', 'balanced', got 'two'", _gspace, reference="two"),
    "batch_norm": _option("batch_norm must be one of 'released', 'paper'", _gspace, batch_norm="none"),
    "allocation": _option("allocation must be one of 'fixed', 'spread'", _gspace, allocation="even"),
    "max_ratio": _option("max_ratio must be at least 1", _gspace, max_ratio=0.9),
    "max_ratio None": _option("max_ratio must be at least 1", _gspace, max_ratio=None),
    "max_ratio huge": _option("max_ratio must be at least 1", _gspace, max_ratio=-(10**400)),
    "max_drift": _option("max_drift must be at least 1", _gspace, max_drift=math.nan),
    "max_drift bytes": _option("max_drift must be at least 1", _gspace, max_drift=b"2"),
    "spread": _option("needs a finite max_ratio", _gspace, allocation="spread", max_ratio=math.inf),
    "norm": _option("max_path_grad_norm must be positive", GSGD, max_path_grad_norm=0.0),
    "norm text": _option("max_path_grad_norm must be positive", GSGD, max_path_grad_norm="x"),
    "two ways": _option("foreach", GSGD, RuntimeError, foreach=True, fused=True),
    "interval": _option("interval must be a positive number", _named("PathSGD"), interval=0),
    "analysis": _option("analysis is what gspace.analyze returns, got str", error=TypeError, analysis="x"),
    "another's analysis": _option("another model", analysis=gspace.analyze(zoo.mlp(3, 4, 2))),
    "strangers": _option(r"shape \(3, 7\) that is no parameter of the model", params=[torch.zeros(3, 7)]),
    "nothing": _option("empty parameter list", params=[]),
    "doubled": Made(_doubled, "more than one parameter group"),
    "inner class": _around(nn.Linear, r"must be a torch\.optim\.Optimizer class"),
    "inner text": _around("adam", r"must be a torch\.optim\.Optimizer class"),
    "inner object": _around(torch.optim.Adam([torch.zeros(1)]), "an object of Adam"),
    "inner LBFGS": _around(torch.optim.LBFGS, "LBFGS", ValueError),
    "parameters": _model(lambda: chain().parameters(), "is the model, not its parameters; got generator", TypeError),
    "a list": _model(lambda: list(chain().parameters()), "is the model, not its parameters; got list", TypeError),
    "a tensor": _model(lambda: chain()[0].weight, "is the model, not its parameters; got Parameter", TypeError),
    "lazy": _model(lambda: nn.Sequential(nn.LazyLinear(4)), "'0.weight' has no shape yet", gspace.TraceError),
    "meta": _model(lambda: chain().to("meta"), "'0.weight' is on the meta device"),
    "inference": _model(_in_inference, "'0.weight' was made under torch.inference_mode"),
}  # fmt: skip


# Steps ----------------------------------------------------------------------------------------------------------------


class Spoiled(NamedTuple):
    """What happens to `chain()` after two steps, so that the next one must raise and change nothing."""

    spoil: Callable[[nn.Sequential], Any]
    says: str
    to: Callable[[Kind], bool] = _all


def _gradient(name: str, value: float) -> Spoiled:
    def spoil(model: nn.Sequential) -> None:
        grad = model.get_parameter(name).grad
        assert grad is not None
        grad.view(-1)[1] = value

    return Spoiled(spoil, f"gradient of {name} is not finite; no weight and no state was changed")


def _changed(change: Callable[[nn.Sequential], Any], where: str) -> Spoiled:
    return Spoiled(change, f"was changed after .* was made: ({where}) is not what it was")


def _sparse(model: nn.Sequential) -> None:
    model[5].weight.grad = model[5].weight.grad.to_sparse()


def _narrow(model: nn.Sequential) -> None:
    """The last rows of a layer and what read them go: strides stay what they were."""
    for name, rows in (("5.weight", 6), ("5.bias", 6)):
        p = model.get_parameter(name)
        p.grad, p.data = None, p.data[:rows].clone()


def _zeros(model: nn.Sequential) -> None:
    model[5].weight.data.zero_()


STEPS: dict[str, Spoiled] = {
    "nan in the first": _gradient("0.weight", math.nan),
    "inf in a bias": _gradient("5.bias", math.inf),
    "-inf in the last": _gradient("7.weight", -math.inf),
    "sparse": Spoiled(_sparse, r"5\.weight has a sparse gradient", lambda k: k.name != "FrozenSkeletonSGD"),
    "zeros": Spoiled(_zeros, r"a path value of .* is 0: rechoose", _gspace),
    "another layer": _changed(lambda m: m.__setitem__(5, nn.Linear(20, 8)), "'5'"),
    "another activation": _changed(lambda m: m.__setitem__(6, nn.GELU()), "'6'"),
    "another parameter": _changed(lambda m: setattr(m[5], "weight", nn.Parameter(torch.randn(8, 20))), "'5.weight'"),
    "another shape": _changed(_narrow, "'5.weight'"),
    "no bias": _changed(lambda m: setattr(m[5], "bias", None), "'5.bias'"),
    "one more": _changed(lambda m: m.append(nn.Softmax(1)), "'8'"),
    "weight norm": _changed(lambda m: parametrizations.weight_norm(m[5]), "'5'|'5.weight'|'5.parametrizations'"),
    "assigned": _changed(lambda m: m.load_state_dict(chain(seed=1).state_dict(), assign=True), "'0.weight'"),
}


# States ---------------------------------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """A state for `Net` that must be refused: it is made from the kind and a good state."""

    state: Callable[[Kind, dict[str, Any]], Any]
    says: str
    to: Callable[[Kind], bool] = _all


def _trained(optimizer: Any, model: nn.Module) -> dict[str, Any]:
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.1)
    optimizer.step()
    return dict(optimizer.state_dict())


def _of_torch(kind: Kind, good: Any) -> Any:
    """That of the twin; without momentum SGD has none."""
    model = Net()
    options = {"momentum": 0.9} if kind.twin is torch.optim.SGD else {}
    return _trained(kind.twin(model.parameters(), lr=0.01, **options), model)


def _of_another(kind: Kind, good: Any) -> Any:
    model = Net()
    return _trained(gspace.InGSpace(model, torch.optim.Adagrad, lr=0.01), model)


def _of_another_network(kind: Kind, good: Any) -> Any:
    model = chain()
    return _trained(kind.make(model), model)


LOADING: dict[str, Loaded] = {
    "none": Loaded(lambda kind, good: None, "an object of NoneType"),
    "a list": Loaded(lambda kind, good: [good], "an object of list"),
    "nothing": Loaded(lambda kind, good: {}, "this state is damaged"),
    "no groups": Loaded(lambda kind, good: {**good, "param_groups": []}, "different number of parameter groups"),
    "torch's": Loaded(_of_torch, "says nothing of a skeleton|has no skeleton|another optimizer, not of"),
    "another inner optimizer's": Loaded(_of_another, "another optimizer", lambda k: k.name != "FrozenSkeletonSGD"),
    "another network's": Loaded(_of_another_network, "doesn't match the size|other sizes"),
    "0.1.0": Loaded(lambda kind, good: {**good, "gspace": {}}, "gspace 0.1.0 saved this state"),
    "0.1.0, frozen": Loaded(lambda kind, good: {**good, "frozen": {}}, "gspace 0.1.0 saved this state"),
}
