"""Mixes several datasets in given proportions, without randomness. Floor 4. Source: formats C.5.

Every sample goes to the dataset that lags furthest behind its share; shuffling happens inside each dataset alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_parm.data.gpt_dataset import Sample, SampleSource
from megatron_parm.errors import ConfigError, DataError

_MOST_IN_PYTHON = 1_000_000  # samples x datasets
SURPLUS = 1.005  # Megatron asks each dataset for half a percent more than its share


@dataclass(frozen=True)
class BlendPlan:
    """The prefixes of one --data-path and their weights, which add up to one; None: in proportion to their sizes."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


@dataclass(frozen=True)
class BlendIndex:
    """For every sample of a blend the dataset it comes from, and its number there."""

    dataset: NDArray[np.integer]
    sample: NDArray[np.integer]


def parse_data_path(values: Sequence[str], flag: str = "--data-path") -> BlendPlan:
    """The plan of `weight prefix weight prefix ...`, or of prefixes alone (an odd count, or no numbers)."""
    if not values:
        raise ConfigError(f"{flag} needs at least one prefix, or pairs of weight and prefix")
    weights = [_number(value) for value in values[::2]]
    if len(values) % 2 or None in weights:
        return BlendPlan(tuple(values), None)
    numbers = [weight for weight in weights if weight is not None]
    total = sum(numbers)
    if min(numbers) <= 0 or not total < math.inf:
        raise ConfigError(f"{flag}: weights {numbers} must all be above zero; leave out a dataset that is not wanted")
    return BlendPlan(tuple(values[1::2]), tuple(weight / total for weight in numbers))


def blend_requests(weights: Sequence[float], num_samples: int) -> tuple[list[int], list[int]]:
    """Samples the blend takes of each dataset, and samples asked of it: half a percent more."""
    shares = [math.ceil(num_samples * weight) for weight in weights]
    return shares, [math.ceil(share * SURPLUS) for share in shares]


def blend_index(weights: Sequence[float], num_samples: int) -> BlendIndex:
    """Sample s comes from the d with the largest w_d * max(s, 1) - count_d, the first of equals."""
    return _deal(weights, num_samples, [num_samples] * len(weights))


def exhaustive_blend_index(sizes: Sequence[int]) -> BlendIndex:
    """Every sample of every dataset once; a dataset that is spent takes no further part."""
    total = sum(sizes)
    return _deal([size / total for size in sizes], total, sizes)


def _deal(weights: Sequence[float], num_samples: int, limits: Sequence[int]) -> BlendIndex:
    """The same steps for few samples in Python, for many compiled: loading numba and compiling takes a second."""
    dataset, sample = np.empty(num_samples, dtype=np.int16), np.empty(num_samples, dtype=np.int64)
    if num_samples * len(weights) <= _MOST_IN_PYTHON:
        chosen, numbers = [0] * num_samples, [0] * num_samples
        _deal_samples(list(weights), list(limits), [0] * len(weights), chosen, numbers)
        dataset[:], sample[:] = chosen, numbers
    else:
        counts = np.zeros(len(weights), dtype=np.int64)
        _compiled()(np.array(weights), np.array(limits, dtype=np.int64), counts, dataset, sample)
    return BlendIndex(dataset, sample)


def _deal_samples(weights: Any, limits: Any, counts: Any, dataset: Any, sample: Any) -> None:
    """Fill `dataset` and `sample`; every choice depends on the counts of all before."""
    for number in range(len(dataset)):
        reach = 1.0 * max(number, 1)
        chosen, largest = -1, -math.inf
        for candidate in range(len(weights)):
            lag = weights[candidate] * reach - counts[candidate]
            if lag > largest and counts[candidate] < limits[candidate]:
                chosen, largest = candidate, lag
        dataset[number] = chosen
        sample[number] = counts[chosen]
        counts[chosen] += 1


@cache
def _compiled() -> Callable[..., None]:
    """`_deal_samples` as machine code, in this process alone: numba would keep it on disk as a pickle."""
    import numba

    compiled: Callable[..., None] = numba.njit(_deal_samples)
    return compiled


class BlendedDataset:
    """Samples of several datasets in the order of a blend index."""

    def __init__(self, datasets: Sequence[SampleSource], names: Sequence[str], index: BlendIndex) -> None:
        self.datasets = tuple(datasets)
        self.index = index
        for number, (dataset, name) in enumerate(zip(datasets, names, strict=True)):
            taken = int(np.count_nonzero(index.dataset == number))
            if taken > len(dataset):
                raise DataError(
                    f"--data-path: the blend takes {taken} samples of {name}, which gives {len(dataset)}; "
                    "raise its weight, or leave it out"
                )

    def __len__(self) -> int:
        return len(self.index.dataset)

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of a blend of {len(self)}")
        return self.datasets[int(self.index.dataset[number])][int(self.index.sample[number])]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
