"""What a kind of model is trained for: its losses, each with a name, a sum and a count. Floor 7.

The trainer knows models only through this: every loss of a step or an evaluation is a sum over a count, and what is
trained for is the sum of all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_parm.data.batches import Batch

HIDDEN_DIMS = 3


class LossSums(Protocol):
    """Runs a model, or one stage of it, on a micro-batch."""

    def __call__(self, model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """The sum of each loss, [k]; of a stage that is not the last its hidden states [s, b, h].

        `hidden` is what the stage before gave; None on the first.
        """


@dataclass(frozen=True)
class Objective:
    """The k losses of a model. The first is the one that a run is judged by.

    names: as the console prints them. sums: see `LossSums`. counts: of a micro-batch, float64 [k]; what each sum is
    divided by for the mean. inputs: the tensor of a micro-batch that the first stage reads.
    """

    names: tuple[str, ...]
    sums: LossSums
    counts: Callable[[Batch], Tensor]
    inputs: str = "tokens"

    def named(self, values: tuple[float, ...]) -> dict[str, float]:
        """Name -> value."""
        return dict(zip(self.names, values, strict=True))


def _next_token_sums(model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> Tensor:
    inputs = batch["tokens"] if hidden is None else hidden
    output: Tensor = model(
        inputs, batch["position_ids"], batch["labels"], batch.get("attention_mask"), batch.get("is_text")
    )
    if output.dim() == HIDDEN_DIMS:
        return output  # [s, b, h], of a stage that is not the last
    return (output * batch["loss_mask"].to(output.dtype)).sum().unsqueeze(0)  # [1]


def _counted_tokens(batch: Batch) -> Tensor:
    return torch.stack([batch["loss_mask"].double().sum()])  # [1]


NEXT_TOKEN = Objective(("lm loss",), _next_token_sums, _counted_tokens)
