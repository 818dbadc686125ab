"""`gspace bench rounding`: folding leaves the function, grids have few values, the page is that of its record."""

import doctest
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from gspace.lab.models import build_model

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "results" / "rounding.json", ROOT / "docs" / "quantization.md"
rounding = pytest.importorskip("benchmarks.rounding", reason="the benchmarks come with the source")


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(name, (3, 8, 8), 10, width=4).double().eval()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            for t in (m.weight, m.running_var):
                nn.init.uniform_(t, 0.2, 3.0)
            for t in (m.bias, m.running_mean):
                nn.init.normal_(t)
    return model


@pytest.mark.parametrize("name", rounding.MODELS)
def test_networks_are_folded_and_equalized_exactly(name: str) -> None:
    model, x = network(name).requires_grad_(False), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    before = model(x)
    for weights in ("as trained", '`equalize_` "max-abs"', '`equalize_` "l2"'):
        made = rounding.WEIGHTS[weights](rounding.folded(model), x)
        assert not any(isinstance(m, nn.BatchNorm2d) for m in made.modules())
        assert float((made(x) - before).abs().max() / before.abs().max()) < 1e-12
    assert torch.equal(model(x), before), "the trained network stays as it is"


@pytest.mark.parametrize("channels", [False, True])
def test_a_grid_has_no_more_values_than_its_bits(channels: bool) -> None:
    made = rounding.rounded(rounding.folded(network("depthwise")), 3, channels=channels)
    for m in made.modules():
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            for values in m.weight if channels else [m.weight]:
                assert values.unique().numel() <= 7
    assert doctest.testmod(rounding).failed == 0


def test_the_page_is_that_of_its_record() -> None:
    text = PAGE.read_text(encoding="utf-8")
    if not RECORD.exists():
        assert "Not measured yet." in text
        return
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert rounding.page(text, record) == text, "gspace bench rounding --table docs/quantization.md"
    record["rows"][0]["error"]["float"] += 0.5
    assert rounding.page(text, record) != text
    assert len({row["seed"] for row in record["rows"]}) >= 3
    assert max(row["moved"] for row in record["rows"] if row["weights"] != "Brevitas") < 1e-12
