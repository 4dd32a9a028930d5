"""tools/bench_experts.py: it compares the two layers before it times them. Reference: the loop over experts itself."""

from unittest.mock import patch

import pytest
from torch import Tensor

from megatron_parm.moe.layer import MoELayer
from tools import bench_experts

SMALL = ["--num-experts", "4", "--tokens", "32", "--hidden", "16", "--ffn", "16", "--iters", "1"]
plain_loop = bench_experts.loop_over_experts


@pytest.mark.parametrize("more", [[], ["--dtype", "bf16"], ["--schedule", "s1n", "--topk", "1"]], ids=str)
def test_the_layer_is_the_loop_and_every_way_is_timed(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_experts.main([*SMALL, *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["ours", "loop over experts", "products alone"]
    assert lines[0].endswith(" 1.00x of ours")


def _without_the_second_choice(layer: MoELayer, topk: int, x: Tensor) -> Tensor:
    return plain_loop(layer, topk - 1, x)


def test_two_layers_that_differ_are_not_timed() -> None:
    """Negative control."""
    with (
        patch.object(bench_experts, "loop_over_experts", _without_the_second_choice),
        pytest.raises(ValueError, match="the layer and the loop over experts differ by"),
    ):
        bench_experts.main(SMALL)


@pytest.mark.parametrize("wrong", ["--hidden 0", "--num-experts 0", "--topk 9", "--schedule s2"])
def test_what_cannot_be_timed_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        bench_experts.main(wrong.split())
    assert left.value.code == 2 and wrong.split(maxsplit=1)[0] in capsys.readouterr().err.splitlines()[-1]
