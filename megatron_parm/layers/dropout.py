"""Dropout that draws from a random stream given to it. Floor 4.

Where an activation is identical on tp its dropout must be too: the stream is an argument. Where each rank of tp holds
its own slice (sequence parallelism) it must differ: there it is the device's default stream, which differs on tp.
"""

import torch
from torch import Tensor, nn


class StreamDropout(nn.Module):
    """Zero each element with `probability` and scale the rest by 1 / (1 - probability), drawing from `generator`
    (None: the device's default stream).

    `probability` is below 1; nothing happens in evaluation, or with 0. The stream lives on the device of its inputs.
    """

    def __init__(self, probability: float, generator: torch.Generator | None) -> None:
        super().__init__()
        self.probability = probability
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, unchanged."""
        if not self.training or self.probability == 0.0:
            return x
        keep = 1.0 - self.probability
        scale = torch.empty_like(x).bernoulli_(keep, generator=self.generator)
        return x * scale.div_(keep)
