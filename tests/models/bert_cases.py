"""Small BERTs for the tests of this folder, and batches with padding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_parm.layers.initialise import initialise_weights
from megatron_parm.models.bert import BertModel
from megatron_parm.models.block import make_feed_forward
from megatron_parm.models.execution import PLAIN, Execution
from megatron_parm.models.shape import ModelShape
from megatron_parm.parallel.context import Axis
from tests.models.gpt_cases import CPU, SINGLE, small_shape


def bert_shape(**changes: object) -> ModelShape:
    """`small_shape` as an encoder with two segments; `norm_placement` "post" is the original layout."""
    return small_shape(**({"is_causal": False, "num_token_types": 2} | changes))


def build_bert_model(
    shape: ModelShape,
    tp: Axis = SINGLE,
    dtype: torch.dtype = torch.float32,
    has_order_head: bool = True,
    execution: Execution = PLAIN,
) -> BertModel:
    """The dense BERT of `shape` with weights of seed 7."""
    model = BertModel(
        shape,
        lambda layer: make_feed_forward(shape, tp=tp, dtype=dtype, device=CPU, execution=execution),
        tp=tp,
        generator=None if execution.sequence_parallel else torch.Generator().manual_seed(5),
        dtype=dtype,
        device=CPU,
        has_order_head=has_order_head,
        execution=execution,
    )
    initialise_weights(model, seed=7)
    return model


@dataclass(frozen=True)
class BertBatch:
    """Rows of one length, the last ones padded; some tokens have a label."""

    tokens: Tensor
    padding_mask: Tensor
    types: Tensor
    labels: Tensor
    is_random: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a model without labels takes."""
        return self.tokens, self.padding_mask, self.types

    @property
    def everything(self) -> tuple[Tensor, ...]:
        """What a model takes that gives losses."""
        return *self.inputs, self.labels, self.is_random


def bert_batch(vocab_size: int, rows: int = 3, length: int = 10) -> BertBatch:
    """Of seed 1; row r ends 2 r tokens before `length`, its second segment begins at 4."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, vocab_size, (rows, length), generator=generator)
    padding_mask = (torch.arange(length) < length - 2 * torch.arange(rows)[:, None]).long()
    is_labelled = (torch.rand(rows, length, generator=generator) < 0.4) & (padding_mask == 1)
    return BertBatch(
        tokens * padding_mask,
        padding_mask,
        (torch.arange(length) >= 4).long().expand(rows, length) * padding_mask,
        torch.where(is_labelled, tokens, -1),
        torch.arange(rows) % 2,
    )
