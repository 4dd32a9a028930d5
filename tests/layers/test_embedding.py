"""Word and position embeddings: against F.embedding, and cut over tp against one process."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_parm.layers.embedding import PositionEmbedding, VocabularyEmbedding
from megatron_parm.layers.initialise import Initialiser, initialise_weights
from megatron_parm.parallel.context import Axis, ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.layers.parallel_check import TOLERANCE, TP_LAYOUTS, Box, boxes_of, gradient_differences

CPU = torch.device("cpu")
TOKENS = torch.tensor([[0, 3, 6, 3], [5, 4, 2, 1]])  # every word of 7, one twice


def _embed(ctx: ParallelContext) -> tuple[Tensor, dict[str, Box]]:
    initialiser = Initialiser("normal", 1.0, valid_rows=7)
    module = VocabularyEmbedding(8, 4, tp=ctx.tp, initialiser=initialiser, dtype=torch.float64, device=CPU)
    initialise_weights(module, 1)
    found = module(TOKENS)  # [2, 4, h]
    (found * torch.arange(32.0).view(2, 4, 4)).sum().backward()
    return found.detach(), boxes_of(module)


@pytest.mark.parametrize("layout", TP_LAYOUTS, ids=str)
def test_words_equal_one_process(pools: Pools, layout: Layout) -> None:
    whole, gradients = pools.run(Layout(1), _embed)[0]
    parts = pools.run(layout, _embed)
    assert all(torch.equal(found, whole) for found, _ in parts), "one summand a word: no rounding at all"
    found = gradient_differences(gradients, [boxes for _, boxes in parts[: layout.tp]])
    assert max(found.values()) < TOLERANCE


def test_one_process_is_torch_embedding() -> None:
    tp = Axis.single("tp")
    words = VocabularyEmbedding(8, 4, tp=tp, initialiser=Initialiser("normal"), dtype=torch.float32, device=CPU)
    positions = PositionEmbedding(6, 4, initialiser=Initialiser("normal"), dtype=torch.float32, device=CPU)
    for module in (words, positions):
        nn.init.normal_(module.weight)
        ids = TOKENS.clamp(max=5)
        assert torch.equal(module(ids), F.embedding(ids, module.weight))
