"""Calls with the wrong arguments: refused in one line that says what is wrong, before anything is changed."""

import copy
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gspace
from zoo import mlp

X, Y = torch.linspace(-1, 1, 20).reshape(4, 5), torch.tensor([0, 1, 2, 0])


def net() -> nn.Sequential:
    return mlp(5, 7, 6, 3)


def with_nan() -> nn.Sequential:
    model = net()
    model[2].weight.data[0, 0] = math.nan
    return model


# Every public call, with something in place of a model.
NO_MODEL: dict[str, Callable[[Any], Any]] = {
    "GSGD": lambda x: gspace.GSGD(x, 0.1),
    "InGSpace": lambda x: gspace.InGSpace(x, torch.optim.SGD, lr=0.1),
    "PathSGD": lambda x: gspace.PathSGD(x, 0.1),
    "FrozenSkeletonSGD": lambda x: gspace.FrozenSkeletonSGD(x, 0.1),
    "analyze": gspace.analyze,
    "are_equivalent": lambda x: gspace.are_equivalent(x, net()),
    "are_equivalent, second": lambda x: gspace.are_equivalent(net(), x),
    "balance_": gspace.balance_,
    "balancedness": gspace.balancedness,
    "basis_path_norm": gspace.basis_path_norm,
    "build_skeleton": lambda x: gspace.build_skeleton(x, gspace.analyze(net())),
    "check_mappings": lambda x: gspace.check_mappings(x, []),
    "compare_invariance": lambda x: gspace.compare_invariance({}, x, [(X, Y)]),
    "distance": lambda x: gspace.distance(x, net()),
    "distance, second": lambda x: gspace.distance(net(), x),
    "equalize_": gspace.equalize_,
    "init_skeleton_": gspace.init_skeleton_,
    "invariance_gap": lambda x: gspace.invariance_gap(lambda m: gspace.GSGD(m, 0.1), x, [(X, Y)]),
    "mappings": gspace.mappings,
    "path_norm": gspace.path_norm,
    "psi_flatness": lambda x: gspace.psi_flatness(x, X, Y),
    "random_scales": gspace.random_scales,
    "RatioStatistics": gspace.RatioStatistics.of,
    "rescale_": lambda x: gspace.rescale_(x, torch.ones(13)),
    "smooth_": lambda x: gspace.smooth_(x, [X]),
    "penalty": lambda x: gspace.BasisPathPenalty(0.1)(x),
    "with an analysis": lambda x: gspace.balance_(x, analysis=gspace.analyze(net())),
}


@pytest.mark.parametrize("wrong", [None, "model", 3, [], {}, X], ids=lambda wrong: type(wrong).__name__)
@pytest.mark.parametrize("call", NO_MODEL)
def test_what_is_no_model_is_refused(call: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"(torch.nn.Module|is the model), .*got {type(wrong).__name__}") as error:
        NO_MODEL[call](wrong)
    assert "\n" not in str(error.value)


def _optimizer(wrong: Any) -> None:
    gspace.GSGD(net(), 0.1).load_state_dict(wrong)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # a call, what it raises, and what is said
    "state None": (lambda: _optimizer(None), ValueError, "this state is damaged: it is an object of NoneType"),
    "state {}": (lambda: _optimizer({}), ValueError, "this state is damaged"),
    "path_norm p": (lambda: gspace.path_norm(net(), None), ValueError, "p must be at least 1 and at most 16, got None"),
    "path_norm graph": (lambda: gspace.path_norm(net(), graph=3), TypeError, "graph is what path_graph returns"),
    "order": (lambda: gspace.basis_path_norm(net(), "2"), ValueError, "order must be at least 1, got '2'"),
    "reference": (lambda: gspace.basis_path_norm(net(), reference="x"), ValueError, "reference must be one of"),
    "penalty": (lambda: gspace.BasisPathPenalty(None), ValueError, "weight must not be negative .* got None"),
    "penalty order": (lambda: gspace.BasisPathPenalty(0.1, order=[8]), ValueError, r"order lie between .* \[8\]"),
    "skeleton": (lambda: gspace.build_skeleton(net(), None), TypeError, "analysis is what gspace.analyze returns"),
    "analysis": (lambda: gspace.balance_(net(), analysis=3), TypeError, "analysis is what gspace.analyze returns"),
    "table": (lambda: gspace.check_mappings(net(), None), TypeError, "a table is a list of entries .* NoneType"),
    "optimizers": (lambda: gspace.compare_invariance(None, net(), [(X, Y)]), TypeError, "functions that make one"),
    "ratios": (lambda: gspace.RatioStatistics(net(), None), TypeError, "at is what coordinates returns"),
    "scales None": (lambda: gspace.rescale_(net(), None), TypeError, "scales must be real numbers, got NoneType"),
    "scales text": (lambda: gspace.rescale_(net(), "ab"), TypeError, "scales must be real numbers, got str"),
    "scales complex": (lambda: gspace.rescale_(net(), torch.ones(13) + 1j), TypeError, "got torch.complex"),
    "scales bool": (lambda: gspace.rescale_(net(), torch.ones(13) > 0), TypeError, "real numbers, got torch.bool"),
    "scales 0": (lambda: gspace.rescale_(net(), torch.zeros(13)), ValueError, "positive and finite; that of unit 1"),
    "std -1": (lambda: gspace.random_scales(net(), std=-1), ValueError, "std must be finite and not negative, got -1"),
    "std None": (lambda: gspace.random_scales(net(), std=None), ValueError, "std must be finite .* got None"),
    "rtol inf": (lambda: gspace.are_equivalent(net(), net(), rtol=math.inf), ValueError, "rtol must be finite"),
    "rtol nan": (lambda: gspace.are_equivalent(net(), net(), rtol=math.nan), ValueError, "rtol must be finite"),
    "rtol -1": (lambda: gspace.are_equivalent(net(), net(), rtol=-1), ValueError, "rtol must .* got -1"),
    "NaN, skeleton": (lambda: gspace.init_skeleton_(with_nan()), ValueError, "2.weight is not finite"),
    "NaN, build": (lambda: gspace.build_skeleton(with_nan(), gspace.analyze(net())), ValueError, "2.weight is not fin"),
    "NaN, balance": (lambda: gspace.balance_(with_nan()), ValueError, "2.weight holds weights that are not finite"),
    "NaN, norm": (lambda: gspace.basis_path_norm(with_nan()), ValueError, "2.weight is not finite"),
    "NaN, equalize": (lambda: gspace.equalize_(with_nan()), ValueError, "2.weight is not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_refused_in_one_line(name: str) -> None:
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message) as error:
        call()
    assert "\n" not in str(error.value)


# Which model an analysis is of ----------------------------------------------------------------------------------------


class Wired(nn.Module):
    """Layers of equal sizes, used in an order that a setting or a function says."""

    def __init__(self, order: Any, activation: Any = torch.relu) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(5, 5) for _ in range(3))
        self.order, self.activation = order, activation

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = self.activation(getattr(self, name)(x))
        return x


class Other(Wired):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.relu(self.b(torch.relu(self.c(x)))))


SAME_NAMES: dict[str, tuple[nn.Module, nn.Module, str]] = {
    "a setting": (Wired("abc"), Wired("bca"), "the Wired itself"),
    "in a list": (Wired(["a", "b", "c"]), Wired(["a", "c", "b"]), "the Wired itself"),
    "another forward": (Wired("cba"), Other("cba"), "the Other itself"),
    "a function": (Wired("abc"), Wired("abc", torch.tanh), "the Wired itself"),
    "a module": (nn.Sequential(Wired("abc"), nn.ReLU()), nn.Sequential(Wired("abc"), nn.GELU()), "its module '1'"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_NAMES)
def test_an_analysis_of_a_model_that_is_wired_otherwise_is_refused(name: str) -> None:
    """All parameters have the names and sizes of the other's."""
    one, two, where = SAME_NAMES[name]
    found = gspace.analyze(one)
    before = copy.deepcopy(two.state_dict())
    scales = gspace.random_scales(one, analysis=found)
    with pytest.raises(ValueError, match=f"of another model, or of this one before .*: {where} has another forward"):
        gspace.rescale_(two, scales, analysis=found)
    with pytest.raises(ValueError, match="the analysis is of another model"):
        gspace.GSGD(two, 0.1, analysis=found)
    assert all(torch.equal(value, before[key]) for key, value in two.state_dict().items())


@pytest.mark.parametrize("name", SAME_NAMES)
def test_a_copy_is_the_model_that_was_analyzed(name: str) -> None:
    """In another dtype and mode, with a hook."""
    one = SAME_NAMES[name][0]
    found = gspace.analyze(one)
    other = copy.deepcopy(one).double().eval()
    other.calls = 7  # a counter
    other.register_forward_hook(lambda *_: None)
    gspace.rescale_(other, gspace.random_scales(one, analysis=found), analysis=found)
    assert gspace.are_equivalent(copy.deepcopy(one).double(), other, analysis=found)


# Large scales ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e55, 1e-55, 1e70])
@pytest.mark.parametrize("depth", [2, 6])
def test_large_scales_are_not_taken_for_zeros(size: float, depth: int) -> None:
    """The squares of these weights and their ratios leave float64; the balanced representative is the same."""
    plain = mlp(4, *[5] * depth, 3).double()
    scaled = copy.deepcopy(plain)
    sign = torch.arange(5 * depth) // 5 % 2 * 2 - 1
    gspace.rescale_(scaled, torch.tensor(size, dtype=torch.float64) ** sign)
    assert gspace.GSGD(scaled, 0.1).statistics()["unused"] == ()
    gspace.balance_(plain)
    gspace.balance_(scaled)
    for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9 * float(p.detach().abs().max()))


# Deep networks --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_building_grows_with_the_depth() -> None:
    """Eight times as many layers took 8 to 10 times as long; in the square of the depth it would be 64."""

    def seconds(layers: int) -> float:
        model = mlp(*[4] * (layers + 1), 2).double()
        begun = time.process_time()
        found = gspace.analyze(model)
        gspace.balance_(model, analysis=found)
        optimizer = gspace.GSGD(model, 0.1, analysis=found)
        model(X[:, :4].double()).sum().backward()
        optimizer.step()
        return time.process_time() - begun

    seconds(10)  # what is made once
    assert seconds(2000) < 20 * seconds(250)
