"""Mixing datasets. Reference: Megatron's orders for given weights."""

import time

import numpy as np
import pytest

from megatron_parm.data import blend
from megatron_parm.data.blend import (
    BlendedDataset,
    BlendPlan,
    blend_index,
    blend_requests,
    exhaustive_blend_index,
    parse_data_path,
)
from megatron_parm.errors import ConfigError, DataError


@pytest.fixture(params=["in Python", "compiled"])
def way(request, monkeypatch) -> None:
    """Few samples are dealt in Python, many by compiled code; here both deal the same few."""
    if request.param == "compiled":
        monkeypatch.setattr(blend, "_MOST_IN_PYTHON", -1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("weights", "order"),
    [
        ([0.3, 0.7], "1 0 1 1 0 1 1 0 1 1 0 1 1 1 0 1 1 0 1 1"),
        ([0.5, 0.3, 0.2], "0 1 2 0 1 0 2 0 1 0 0 1 2 0 1"),
        ([0.001, 0.999], "1 0 1 1 1"),
    ],
)
def test_known_orders(weights, order) -> None:
    index = blend_index(weights, len(order.split()))
    assert " ".join(map(str, index.dataset)) == order
    for number in range(len(weights)):
        taken = index.sample[index.dataset == number]
        assert taken.tolist() == list(range(len(taken)))


@pytest.mark.usefixtures("way")
def test_known_exhaustive_order() -> None:
    index = exhaustive_blend_index([2, 4, 3])
    assert index.dataset.tolist() == [1, 2, 0, 1, 2, 1, 0, 2, 1]
    assert index.sample.tolist() == [0, 0, 0, 1, 1, 2, 1, 2, 3]


@pytest.mark.parametrize("weights", [[0.3, 0.7], [1 / 3, 1 / 3, 1 / 3], [0.1, 0.2, 0.3, 0.4], [0.001, 0.4, 0.599]])
def test_compiled_code_deals_as_python_does(weights, monkeypatch) -> None:
    """Ties, and sums that floating point rounds, included."""
    in_python = blend_index(weights, 5000)
    monkeypatch.setattr(blend, "_MOST_IN_PYTHON", -1)
    compiled = blend_index(weights, 5000)
    for name in ("dataset", "sample"):
        ours, theirs = getattr(compiled, name), getattr(in_python, name)
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)


def test_ten_million_samples_are_dealt_in_seconds() -> None:
    weights = [0.05 * number for number in (1, 2, 3, 4, 10)]
    started = time.process_time()
    index = blend_index(weights, 10_000_000)
    assert time.process_time() - started < 5
    shares = np.bincount(index.dataset) / len(index.dataset)
    assert shares == pytest.approx(weights, abs=1e-6)
    assert int(index.sample.max()) == round(0.5 * 10_000_000) - 1


@pytest.mark.parametrize(
    ("values", "plan"),
    [
        (["a"], BlendPlan(("a",), None)),
        (["a", "b"], BlendPlan(("a", "b"), None)),
        (["1", "a", "b"], BlendPlan(("1", "a", "b"), None)),
        (["3", "a"], BlendPlan(("a",), (1.0,))),
        (["3", "a", "1", "b"], BlendPlan(("a", "b"), (0.75, 0.25))),
        (["3", "a", "x", "b"], BlendPlan(("3", "a", "x", "b"), None)),
    ],
)
def test_data_path(values, plan) -> None:
    assert parse_data_path(values) == plan


@pytest.mark.parametrize("values", [[], ["0", "a", "1", "b"], ["-1", "a", "2", "b"], ["nan", "a"], ["inf", "a"]])
def test_what_is_no_blend_is_refused(values) -> None:
    with pytest.raises(ConfigError, match="--train-data-path"):
        parse_data_path(values, "--train-data-path")


def test_requests_are_rounded_up_twice() -> None:
    assert blend_requests([0.3, 0.7], 1001) == ([301, 701], [303, 705])


class Letters:
    def __init__(self, name, count) -> None:
        self.name, self.count = name, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number):
        return f"{self.name}{number}"


def test_samples_come_from_their_datasets() -> None:
    blend = BlendedDataset([Letters("a", 9), Letters("b", 9)], ["a", "b"], blend_index([0.3, 0.7], 6))
    assert [blend[number] for number in range(len(blend))] == ["b0", "a0", "b1", "b2", "a1", "b3"]
    with pytest.raises(IndexError):
        blend[6]


def test_an_overdrawn_dataset_is_named() -> None:
    with pytest.raises(DataError, match="takes 1 samples of tiny, which gives 0"):
        BlendedDataset([Letters("a", 0), Letters("b", 9)], ["tiny", "b"], blend_index([0.001, 0.999], 5))
