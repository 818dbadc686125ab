"""What cannot be analyzed is refused in one line that says what to do; what was not seen is said."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gspace
from parts import Net
from programs import normal
from zoo import mlp

X = normal(6, 5).float()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(5).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.w, x.T).T


class Quantized(nn.Module):
    """As torch's dynamic quantization leaves a linear layer: the weight is no parameter any more."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.quantize_per_tensor(torch.randn(3, 5), 0.1, 0, torch.qint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w.dequantize())


def two_heads(s: Any, x: Tensor) -> Tensor:
    h = F.relu(s.a(x))
    return s.o(h) if x[0, 0] > 0 else s.p(h)


REFUSED: dict[str, tuple[Callable[[], Any], Any, str]] = {
    # a model, an example, and what is said
    "no module": (lambda: [1, 2], X, r"expected a torch\.nn\.Module, got list"),
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(7), nn.ReLU(), nn.Linear(7, 3)), X,
        r"parameter '0\.weight' has no shape yet \(lazy module\): run one batch",
    ),
    "sparse": (Sparse, X, r"parameter 'w' is sparse or quantized: analyze the dense model"),
    "quantized": (Quantized, X, r"parameter 'w' is sparse or quantized: analyze the dense model"),
    "quantized layers": (
        lambda: torch.ao.quantization.quantize_dynamic(mlp(5, 7, 3)), X,
        "module '0' is quantized: analyze the dense model",
    ),
    "TorchScript": (lambda: torch.jit.trace(mlp(5, 7, 3), X), X, "pass the module that it was made from"),
    "no forward": (lambda: nn.ModuleList([mlp(5, 7, 3)]), X, "ModuleList has no forward: pass the module that calls"),
    "wrong width": (
        lambda: mlp(5, 7, 3), torch.randn(2, 4), "does not accept this example_input: RuntimeError: mat1 and mat2",
    ),
    "wrong dtype": (lambda: mlp(5, 7, 3), X.long(), "does not accept this example_input: RuntimeError"),
    "too many": (lambda: mlp(5, 7, 3), (X, X), "does not accept this example_input: TypeError"),
    "other names": (lambda: mlp(5, 7, 3), {"y": X}, "does not accept this example_input: TypeError"),
    "no tensors": (lambda: mlp(5, 7, 3), (8, 5), "does not accept this example_input: TypeError"),
    "no input": (lambda: mlp(5, 7, 3), 5, "example_input must be a Tensor, a tuple or a dict of inputs, got int"),
    "none can be guessed": (
        lambda: Net(lambda s, x: s.a(x.unflatten(1, (41, 3))), a=nn.Linear(3, 4)), None,
        r"no input of the model could be guessed \(tried 2×3, .*: pass example_input=, a batch the model accepts",
    ),
    "nothing to guess from": (
        lambda: Net(lambda s, x, y: x[:, 3] + y), None, "no input of the model could be guessed .*: pass example_input",
    ),
    "it raises": (
        lambda: Net(lambda s, x: (_ for _ in ()).throw(KeyError("vocabulary")), a=nn.Linear(5, 3)), X,
        "does not accept this example_input: KeyError: 'vocabulary'",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*(jit|Sparse|deprecated)")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_in_one_line(name: str) -> None:
    build, example, message = REFUSED[name]
    with pytest.raises((gspace.TraceError, TypeError), match=message) as error:
        gspace.analyze(build(), example)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residual": "both"}, "residual must be 'pin' or 'tie', got 'both'"),
        ({"pin": ["layer9"]}, "the model has no module 'layer9'"),
        ({"pin": "2.weigth"}, r"the model has no module '2\.weigth'; did you mean '2\.weight'\?"),
        ({"pin": 3}, r"pin takes names of modules, got \[3\]"),
        ({"modes": ("test",)}, "modes are 'train', 'eval' or both"),
        ({"modes": ()}, "modes are 'train', 'eval' or both"),
    ],
)
def test_options_that_do_not_exist_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        gspace.analyze(mlp(5, 7, 6, 3), X, **options)


def test_what_no_run_reached_is_listed_and_not_rescaled() -> None:
    model = Net(two_heads, a=nn.Linear(5, 7), o=nn.Linear(7, 3), p=nn.Linear(7, 3))
    positive, negative = X.abs(), -X.abs()
    found = gspace.analyze(model, [positive, negative])
    assert (found.H, found.unseen) == (7, {})
    beside = Net(lambda s, x: s.o(F.relu(s.a(x))), a=nn.Linear(5, 7), o=nn.Linear(7, 3), p=nn.Linear(7, 3))
    found = gspace.analyze(beside, X)
    assert found.unseen == {"p.weight": 21, "p.bias": 3}
    assert gspace.analyze(beside, X, pin=["p"]).unseen == {}


def test_an_analysis_of_the_model_inside_a_wrapper_is_of_another_model() -> None:
    model = mlp(5, 6, 3)
    with pytest.raises(ValueError, match="a wrapped model is another one"):
        gspace.GSGD(nn.DataParallel(model), 0.1, analysis=gspace.analyze(model))


def test_no_path_sum_of_a_model_on_the_meta_device() -> None:
    with pytest.raises(ValueError, match="is on the meta device and has no values: materialize the model first"):
        gspace.path_norm(mlp(5, 7, 3).to("meta"))


META = {
    "init_skeleton_": gspace.init_skeleton_,
    "build_skeleton": lambda m: gspace.build_skeleton(m, gspace.analyze(m)),
    "distance": lambda m: gspace.distance(m, m),
    "distance to it": lambda m: gspace.distance(mlp(5, 7, 3), m),
    "psi_flatness": lambda m: gspace.psi_flatness(m, X.to("meta"), torch.zeros(6, dtype=torch.long, device="meta")),
    "are_equivalent": lambda m: gspace.are_equivalent(m, m),
    "are_equivalent to it": lambda m: gspace.are_equivalent(mlp(5, 7, 3), m),
    "balancedness": gspace.balancedness,
}


@pytest.mark.parametrize("name", META)
def test_what_needs_values_says_that_the_meta_device_has_none(name: str) -> None:
    """Some calls passed on what torch says of `item` and of copies."""
    with pytest.raises(ValueError, match="is on the meta device and has no values: materialize the model first"):
        META[name](mlp(5, 7, 3).to("meta"))


def test_values_of_a_model_on_the_meta_device_are_not_read() -> None:
    model = Net(lambda s, x: s.o(F.relu(s.a(x)) * s.a.weight.norm().item()), a=nn.Linear(5, 7), o=nn.Linear(7, 3))
    assert gspace.analyze(mlp(5, 7, 3).to("meta"), X.to("meta")).H == 7
    with pytest.raises(gspace.TraceError, match="does not accept this example_input"):
        gspace.analyze(model.to("meta"), X.to("meta"))
