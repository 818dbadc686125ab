"""Whatever is read or typed: states, records, data files, SPEC strings, tables of mappings. Nothing but a refusal.

Few examples by default, 250 in `make test-rest`.
"""

import contextlib
import copy
import json
import string
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import gspace
from contract import Kind, flatten, train
from contract import batches as draw_batches
from error_inputs import OURS
from gspace.lab.analyze import load_model, parse_spec
from gspace.lab.archive import from_lines, read_records
from gspace.lab.data import read_idx, read_npz
from gspace.lab.errors import LabError
from zoo import mlp

RECORDS = Path(__file__).resolve().parents[1] / "results" / "runs"
fuzzed = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
tensors = st.builds(
    lambda shape, dtype, fill: torch.full(shape, fill).to(dtype),
    st.lists(st.integers(0, 21), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.uint8, torch.int64, torch.bool, torch.complex64]),
    st.sampled_from([0.0, 1.0, -1.0, 255.0, 1e30, float("nan"), float("inf")]),
)


def outcome(call: Callable[[], Any], *errors: type[Exception]) -> Any:
    """What a call gives; None if it was refused, which is one line."""
    try:
        return call()
    except errors as error:
        told = str(error)
    assert len(told.splitlines()) == 1
    return None


# States ---------------------------------------------------------------------------------------------------------------


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.ReLU(), nn.Linear(4, 3))


@cache
def good_state(name: str) -> dict[str, Any]:
    kind, model = next(kind for kind in OURS if kind.name == name), chain()
    optimizer = kind.make(model)
    train(model, optimizer, draw_batches(2))
    return optimizer.state_dict()


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, value in items for place in places(value, (*path, key)))]


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    tree[path[0]] = replaced(tree[path[0]], path[1:], value)
    return tree


def byte_changed(data: st.DataObject, tensor: torch.Tensor) -> torch.Tensor:
    raw = bytearray(tensor.numpy().tobytes())
    if raw:
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    return torch.frombuffer(raw, dtype=tensor.dtype).reshape(tensor.shape) if raw else tensor


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.name)
@fuzzed
@given(data=st.data())
def test_states_are_loaded_or_refused_as_a_whole(kind: Kind, data: st.DataObject) -> None:
    """What is accepted takes a step, in C where that is the way; what is refused leaves no trace."""
    state = copy.deepcopy(good_state(kind.name))
    for _ in range(data.draw(st.integers(1, 3))):
        found = [path for path in places(state) if path]
        if not found:
            break
        path = data.draw(st.sampled_from(found))
        value: Any = state
        for key in path:
            value = value[key]
        if isinstance(value, torch.Tensor) and data.draw(st.booleans()):
            state = replaced(state, path, byte_changed(data, value))
        else:
            state = replaced(state, path, data.draw(tensors | anything))
    model = chain()
    optimizer = kind.make(model)
    before = flatten(copy.deepcopy(optimizer.state_dict()))
    weights = copy.deepcopy(model.state_dict())
    if outcome(lambda: optimizer.load_state_dict(state) or True, ValueError) is None:
        assert flatten(optimizer.state_dict()) == before
        return
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.01)
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        optimizer.step()  # hyper-parameters, and what an inner optimizer keeps, are torch's to check


# Records --------------------------------------------------------------------------------------------------------------


@cache
def record_line() -> str:
    return min(RECORDS.glob("*.jsonl")).read_text(encoding="utf-8").splitlines()[0]


@fuzzed
@given(data=st.data())
def test_records_are_read_as_they_were_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    content = json.loads(record_line())
    path = data.draw(st.sampled_from([p for p in places(content) if p]))
    changed = replaced(content, path, data.draw(anything))
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps(changed) + "\n")
    found = outcome(lambda: from_lines(file), LabError)
    file.write_text(record_line() + "\n")
    assert found in (None, from_lines(file))


@fuzzed
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@example(content=b"")
@example(content=b"[]\n{}\n")
@example(content=b"{" * 100_000)
def test_a_file_of_records_of_any_content(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_bytes(content)
    assert outcome(lambda: read_records([tmp_path]), LabError) in (None, [])


# Data files -----------------------------------------------------------------------------------------------------------


@fuzzed
@given(content=st.binary(max_size=64) | st.binary(max_size=40).map(lambda x: bytes([0, 0, 8, 3]) + x))
@example(content=bytes([0, 0, 8, 3]) + b"\xff" * 12)  # more images than memory holds
@example(content=bytes([0, 0, 8, 255]))
@example(content=b"PK\x03\x04")
def test_data_files_of_any_content(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir(exist_ok=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        for end in ("", ".gz"):
            (tmp_path / "raw" / f"{name}-ubyte{end}").write_bytes(content)
    (tmp_path / "set.npz").write_bytes(content)
    for read in (partial(read_idx, folder="raw"), partial(read_npz, file="set.npz")):
        found = outcome(partial(read, tmp_path), LabError)
        assert found is None or all(len(array) == 0 for array, _ in found.values())  # too short for an image


# SPEC strings and tables ----------------------------------------------------------------------------------------------

MODEL = "from torch import nn\n\n\ndef build(width=3, **more):\n    return nn.Linear(width, 2)\n"
words = st.text(string.ascii_letters + string.digits + "_.:()=,'\"[]{}*-+/ \n\0é", max_size=30)


@fuzzed
@given(spec=words | words.map(lambda text: f"model.py:build({text})") | words.map(lambda text: f"model.py:{text}"))
@example(spec="model.py:build(" + "(" * 500)
@example(spec="model.py:build(width=9**9**9)")
@example(spec="hf:LlamaConfig(")
def test_specs_of_any_text(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    assert isinstance(outcome(lambda: load_model(parse_spec(spec)), LabError), nn.Module | None)


names = st.sampled_from(["0", "2", "4", "0.weight", "", "9", "re:.*", "re:(", "re:^2$", "re:0|2"])
entries = st.tuples(names, st.lists(names, max_size=3)) | st.tuples(st.lists(names, max_size=2), names)
entries |= st.fixed_dictionaries({"smooth_layer": names, "balance_layers": st.lists(names, max_size=3)})


@fuzzed
@given(table=st.lists(entries | anything, max_size=4))
@example(table=[("0", ["2"])])
def test_tables_of_any_content(table: list[Any]) -> None:
    """A line for every problem, or one that says what an entry is."""
    model = mlp(4, 5, 5, 3)
    before = copy.deepcopy(model.state_dict())
    problems = outcome(lambda: gspace.check_mappings(model, table), ValueError, TypeError) or []
    assert all(isinstance(line, str) and len(line.splitlines()) == 1 for line in problems)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
