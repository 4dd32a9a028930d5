"""The transformer block against its formula written out."""

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.layers.initialise import initialise_weights
from megatron_parm.models.block import TransformerBlock, make_feed_forward
from tests.models.gpt_cases import CPU, SINGLE, small_shape

X = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(1))


def block_of(mlp: nn.Module | None = None, **changes: object) -> TransformerBlock:
    shape = small_shape(**changes)
    mlp = mlp or make_feed_forward(shape, tp=SINGLE, dtype=torch.float32, device=CPU)
    block = TransformerBlock(
        shape, mlp, tp=SINGLE, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device=CPU
    )
    initialise_weights(block, 1)
    for norm in (block.input_layernorm, block.pre_mlp_layernorm):
        nn.init.normal_(norm.weight)
    return block


@pytest.mark.parametrize("is_normed", [False, True])
def test_formula(is_normed: bool) -> None:
    block = block_of(residual_is_normed=is_normed)
    normed = block.input_layernorm(X)
    after = (normed if is_normed else X) + block.self_attention(normed, None, None)
    normed = block.pre_mlp_layernorm(after)
    expected = (normed if is_normed else after) + block.mlp(normed)
    torch.testing.assert_close(block(X, None, None), expected)


def test_dropout_falls_on_both_branches_and_never_on_the_residual() -> None:
    class Zero(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones_like(x)

    block = block_of(Zero(), hidden_dropout=0.5)
    nn.init.zeros_(block.self_attention.linear_proj.weight)
    nn.init.ones_(block.self_attention.linear_proj.bias)
    added = (block(X, None, None) - X).round().unique().tolist()
    assert added == [0.0, 2.0, 4.0]  # each branch adds 0 or 1 / 0.5
    block.eval()
    torch.testing.assert_close(block(X, None, None), X + 2)
