"""Embedding and output head of a small model against plain products."""

import torch

from megatron_parm.layers.initialise import initialise_weights
from megatron_parm.models.heads import OutputWeight, TokenEmbedding, output_logits
from tests.models.gpt_cases import CPU, SINGLE, batch_of, small_shape

SHAPE = small_shape()


def test_embedding_is_word_plus_position() -> None:
    embedding = TokenEmbedding(SHAPE, tp=SINGLE, generator=torch.Generator(), dtype=torch.float32, device=CPU)
    initialise_weights(embedding, 1)
    tokens, _, _ = batch_of(SHAPE)
    position_ids = torch.randint(0, 12, tokens.shape)
    words, positions = embedding.word_embeddings.weight, embedding.position_embeddings.weight
    expected = (words[tokens] + positions[position_ids]).transpose(0, 1)  # [s, b, h]
    torch.testing.assert_close(embedding(tokens, position_ids), expected)
    assert words[:13].abs().sum(1).min() > 0
    assert not words[13:].any()


def test_a_model_with_rotary_positions_has_no_position_rows() -> None:
    shape = small_shape(positions="rope")
    embedding = TokenEmbedding(shape, tp=SINGLE, generator=torch.Generator(), dtype=torch.float32, device=CPU)
    assert [name for name, _ in embedding.named_parameters()] == ["word_embeddings.weight"]


def test_logits_are_a_product_with_every_word() -> None:
    head = OutputWeight(SHAPE, tp=SINGLE, dtype=torch.float32, device=CPU)
    initialise_weights(head, 1)
    hidden = torch.randn(5, 2, 32)
    torch.testing.assert_close(output_logits(hidden, head.weight, SINGLE), hidden @ head.weight.t())
