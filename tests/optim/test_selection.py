"""Patterns over names of parameters. References: matches and powers worked by hand."""

import pytest

from megatron_parm.errors import ConfigError
from megatron_parm.optim.selection import depth_factor, is_matched, rate_factor, require_matches
from tests.config.commands import config_of

NAMES = [
    "embedding.word_embeddings.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.1.mlp.linear_fc1.weight",
    "decoder.layers.11.mlp.linear_fc1.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
]


def test_a_star_is_any_text_and_a_number_is_that_number() -> None:
    matched = [name for name in NAMES if is_matched(name, ("decoder.layers.1.*", "output*"))]
    assert matched == [NAMES[2], NAMES[5]]
    assert not is_matched(NAMES[0], ())


def test_a_pattern_without_a_match_is_told_with_the_nearest_names() -> None:
    require_matches("--freeze", ("*.weight", "embedding.*"), NAMES)
    with pytest.raises(ConfigError, match=r"--freeze embeding\.word_embeddings\.weight: .*embedding\.word_embeddings"):
        require_matches("--freeze", ("*", "embeding.word_embeddings.weight"), NAMES)
    with pytest.raises(ConfigError, match=r"--lr-factor zz: no parameter .* decoder\.final_layernorm"):
        require_matches("--lr-factor", ("zz",), NAMES)


def test_the_rate_falls_with_the_distance_from_the_head() -> None:
    factors = [depth_factor(name, 12, 0.5) for name in NAMES]
    assert factors == [0.5**13, 0.5**12, 0.5**11, 0.5, 1.0, 1.0]
    assert [depth_factor(name, 12, 1.0) for name in NAMES] == [1.0] * 6


def test_the_last_factor_that_matches_counts_beside_the_depth() -> None:
    factors = (("decoder.*", 0.1), ("*linear_fc1*", 3.0))
    assert rate_factor(NAMES[3], factors, 12, 0.5) == 1.5
    assert rate_factor(NAMES[4], factors, 12, 0.5) == 0.1
    assert rate_factor(NAMES[5], factors, 12, 0.5) == 1.0


@pytest.mark.parametrize("word", ["embedding.*", "embedding.*=", "embedding.*=-1", "=2", "x=nan", "x=inf"])
def test_a_factor_that_is_no_number_is_refused(word: str) -> None:
    optim = config_of(f"--lr-factor {word}").optim
    with pytest.raises(ConfigError, match="--lr-factor"):
        optim.rate_factors  # noqa: B018 - a property that checks


def test_factors_are_read_with_their_patterns() -> None:
    optim = config_of("--lr-factor embedding.*=0.1 a=b=2").optim
    assert optim.rate_factors == (("embedding.*", 0.1), ("a=b", 2.0))
