"""Figures that many micro-batches and ranks share, each declaring how its parts join. Floor 2.

A mean is kept as a total and a weight to the very end, so it is never a mean of means: two evaluation batches with loss
sum and token count 2/1 and 90/9 give 92/10 = 9.2. The reduction over ranks is a function handed in (this room knows no
process groups). Which weight a training loss has is the caller's: 1 for each micro-batch, or its token count with
`--calculate-per-token-loss`; a validation loss always has its token count.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "max"]


@dataclass(frozen=True)
class Metric:
    """One rank's part of one figure, from one micro-batch or several.

    `mean`: the global value is the sum of all totals over the sum of all weights. `sum`, `max`: of the totals.
    Totals and weights may be tensors of one element: nothing waits for the device before the reduction.
    """

    name: str
    reduction: Reduction
    total: float | Tensor
    weight: float | Tensor = 1.0


def mean_of(name: str, total: float | Tensor, weight: float | Tensor) -> Metric:
    """A part of a weighted mean: `total` is a sum over `weight` items (tokens, micro-batches)."""
    return Metric(name, "mean", total, weight)


def sum_of(name: str, total: float | Tensor) -> Metric:
    """A part of a sum."""
    return Metric(name, "sum", total)


def max_of(name: str, value: float | Tensor) -> Metric:
    """A candidate for a maximum."""
    return Metric(name, "max", value)


def keep(values: Tensor) -> Tensor:
    """The reduction over one rank: the values themselves."""
    return values


class MetricSum:
    """Adds up the metrics declared at construction and reduces them all in two calls.

    Every rank that takes part in the reduction declares the same names, whether or not it has anything to add: a stage
    without the loss adds nothing and still gets the global value.
    """

    def __init__(self, declared: Mapping[str, Reduction], device: torch.device) -> None:
        self._declared = dict(sorted(declared.items()))
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Forget everything added."""
        self._totals: dict[str, float | Tensor] = {
            name: -math.inf if reduction == "max" else 0.0 for name, reduction in self._declared.items()
        }
        self._weights: dict[str, float | Tensor] = dict.fromkeys(self._declared, 0.0)
        self._nan_maxima: dict[str, float | Tensor] = dict.fromkeys(self._declared, 0.0)

    def add(self, *metrics: Metric) -> None:
        """Add parts. Raises KeyError for a name that was not declared, ValueError for another reduction."""
        for metric in metrics:
            if self._declared[metric.name] != metric.reduction:
                raise ValueError(
                    f"metric {metric.name!r} was declared as {self._declared[metric.name]}, not {metric.reduction}"
                )
            total = self._wide(metric.total)
            if metric.reduction == "max":
                # A MAX over ranks may lose a NaN (gloo does), so NaNs travel as a count of their own.
                self._nan_maxima[metric.name] = self._nan_maxima[metric.name] + total.isnan()
                self._totals[metric.name] = torch.maximum(
                    self._wide(self._totals[metric.name]), total.nan_to_num(-math.inf, math.inf, -math.inf)
                )
            else:
                self._totals[metric.name] = self._totals[metric.name] + total
                self._weights[metric.name] = self._weights[metric.name] + self._wide(metric.weight)

    def reduce(
        self, sum_over: Callable[[Tensor], Tensor] = keep, max_over: Callable[[Tensor], Tensor] = keep
    ) -> dict[str, float]:
        """The global value of every declared metric, in the order of the alphabet; then begin again from nothing.

        Call on every rank that `sum_over` and `max_over` span; each must take a float64 vector and return the
        elementwise sum or maximum over those ranks. A sum counts every rank: span only ranks that hold different
        parts. A mean over weight 0 and a maximum over nothing are NaN.
        """
        sums = [name for name, reduction in self._declared.items() if reduction != "max"]
        maxima = [name for name, reduction in self._declared.items() if reduction == "max"]
        parts = [self._totals[name] for name in sums]
        parts += [self._weights[name] for name in sums]
        parts += [self._nan_maxima[name] for name in maxima]
        summed = sum_over(self._vector(parts)).tolist() if parts else []
        largest = max_over(self._vector([self._totals[name] for name in maxima])).tolist() if maxima else []
        values: dict[str, float] = {}
        for place, name in enumerate(sums):
            total, weight = summed[place], summed[len(sums) + place]
            is_mean = self._declared[name] == "mean"
            values[name] = total if not is_mean else total / weight if weight else math.nan
        for place, name in enumerate(maxima):
            has_value = summed[2 * len(sums) + place] == 0 and largest[place] != -math.inf
            values[name] = largest[place] if has_value else math.nan
        self.clear()
        return {name: values[name] for name in self._declared}

    def _wide(self, value: float | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64, device=self._device).detach().reshape(())

    def _vector(self, values: list[float | Tensor]) -> Tensor:
        return torch.stack([self._wide(value) for value in values])  # [len(values)]
