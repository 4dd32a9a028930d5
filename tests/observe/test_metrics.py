"""Reference: the fractions of FC-38, and one rank holding all parts at once."""

import math

import pytest
import torch

from megatron_parm.observe.metrics import MetricSum, max_of, mean_of, sum_of

CPU = torch.device("cpu")
DECLARED = {"lm loss": "mean", "tokens": "sum", "load": "max"}


def reduce_together(ranks):
    """Reduce several MetricSums as if each were a rank: one collects the vectors, the last gets their sum."""
    sums, maxima = [], []

    def collect(store):
        def take(vector):
            store.append(vector)
            return vector

        return take

    for rank in ranks[:-1]:
        rank.reduce(collect(sums), collect(maxima))
    return ranks[-1].reduce(
        lambda own: torch.stack([*sums, own]).sum(0), lambda own: torch.stack([*maxima, own]).amax(0)
    )


def test_validation_is_weighted_by_tokens():
    """FC-38: sums and counts 2/1 and 90/9 give 92/10 = 9.2; a mean of means would give 6.0."""
    loss = MetricSum({"lm loss": "mean"}, CPU)
    loss.add(mean_of("lm loss", 2.0, 1), mean_of("lm loss", 90.0, 9))
    assert loss.reduce() == {"lm loss": 9.2}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_value_does_not_depend_on_how_parts_are_spread_over_ranks(ranks):
    parts = [(2.0, 1.0), (90.0, 9.0), (7.5, 3.0), (0.0, 0.0)]
    held = [MetricSum(DECLARED, CPU) for _ in range(ranks)]
    for place, (total, weight) in enumerate(parts):
        held[place % ranks].add(
            mean_of("lm loss", torch.tensor(total), torch.tensor(weight)),
            sum_of("tokens", weight),
            max_of("load", total),
        )
    assert reduce_together(held) == {"lm loss": 99.5 / 13.0, "load": 90.0, "tokens": 13.0}


def test_a_rank_without_a_part_adds_nothing_and_gets_the_global_value():
    """FC-37: a stage without the loss neither fails nor contributes a placeholder."""
    with_loss, without = MetricSum(DECLARED, CPU), MetricSum(DECLARED, CPU)
    with_loss.add(mean_of("lm loss", 9.0, 2.0), sum_of("tokens", 2), max_of("load", -3.0))
    assert reduce_together([with_loss, without]) == {"lm loss": 4.5, "load": -3.0, "tokens": 2.0}


@pytest.mark.parametrize("name", ["lm loss", "tokens", "load"])
def test_a_nan_on_any_rank_is_seen(name):
    """Also in a maximum, where a backend may lose it: here the maximum's vector holds no NaN at all."""
    ill, well = MetricSum(DECLARED, CPU), MetricSum(DECLARED, CPU)
    parts = {"lm loss": (mean_of, (1.0,)), "tokens": (sum_of, ()), "load": (max_of, ())}
    for held, value in ((ill, math.nan), (well, 1.0)):
        make, weight = parts[name]
        held.add(make(name, value, *weight))
    assert math.isnan(reduce_together([ill, well])[name])


def test_infinity_stays_infinity_in_a_maximum():
    load = MetricSum({"load": "max"}, CPU)
    load.add(max_of("load", math.inf), max_of("load", 1.0))
    assert load.reduce() == {"load": math.inf}


def test_nothing_added():
    values = MetricSum(DECLARED, CPU).reduce()
    assert math.isnan(values["lm loss"]) and math.isnan(values["load"]) and values["tokens"] == 0.0


def test_reducing_begins_again():
    loss = MetricSum(DECLARED, CPU)
    loss.add(mean_of("lm loss", 8.0, 1.0), max_of("load", 5.0))
    loss.reduce()
    loss.add(mean_of("lm loss", 1.0, 1.0), max_of("load", 2.0))
    assert loss.reduce() == {"lm loss": 1.0, "load": 2.0, "tokens": 0.0}


def test_float32_parts_are_added_in_float64():
    """2^24 + 1 is not a float32: a float32 sum would stay at 16777216."""
    total = MetricSum({"n": "sum"}, CPU)
    total.add(sum_of("n", torch.tensor(2.0**24)), sum_of("n", torch.tensor(1.0)))
    assert total.reduce() == {"n": 2.0**24 + 1}


def test_no_graph_is_kept():
    loss = torch.ones(1, requires_grad=True) * 3.0
    held = MetricSum({"lm loss": "mean"}, CPU)
    held.add(mean_of("lm loss", loss, 1.0))
    assert held.reduce() == {"lm loss": 3.0}


def test_undeclared_names_and_other_reductions_are_refused():
    held = MetricSum({"lm loss": "mean"}, CPU)
    with pytest.raises(KeyError):
        held.add(sum_of("tokens", 1.0))
    with pytest.raises(ValueError, match="declared as mean, not sum"):
        held.add(sum_of("lm loss", 1.0))
