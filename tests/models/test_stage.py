"""Stages of a pipeline, run one after another in one process, against the whole model."""

from itertools import pairwise

import pytest
import torch

from tests.models.gpt_cases import batch_of, build, small_shape

CUTS = {"one and two": (0, 1, 3), "three": (0, 1, 2, 3)}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("ties", [True, False])
def test_stages_in_a_row_equal_the_whole_model(cuts: tuple[int, ...], ties: bool) -> None:
    shape = small_shape(num_layers=3, positions="rope" if ties else "learned_absolute", ties_embeddings=ties)
    tokens, position_ids, labels = batch_of(shape)
    whole = build(shape, dtype=torch.float64)
    loss = whole(tokens, position_ids, labels)
    loss.mean().backward()
    stages = [build(shape, dtype=torch.float64, layers=range(start, stop)) for start, stop in pairwise(cuts)]
    values = tokens
    for stage in stages:
        values = stage(values, position_ids, labels)
    assert torch.equal(values, loss)
    values.mean().backward()

    gradients: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            shared = gradients.get(name, torch.zeros_like(parameter))
            gradients[name] = shared + parameter.grad  # a tied embedding lies on the first and on the last stage
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-14)


def test_only_what_a_stage_needs_is_held() -> None:
    shape = small_shape(num_layers=3)
    middle = build(shape, layers=range(1, 2))
    assert all(name.startswith("decoder.layers.1.") for name, _ in middle.named_parameters())
    last = {name for name, _ in build(shape, layers=range(2, 3)).named_parameters()}
    others = {name for name in last if not name.startswith("decoder.layers.2.")}
    assert others == {
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "decoder.final_layernorm.bias",
    }
