"""Initial weights: parts of one global matrix on every layout (FC-33), padding and experts included."""

import math

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.layers.initialise import ONES, Initialiser, attach, initialise_weights
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.sharding import Cut, make_parameter, spec_of

CPU = torch.device("cpu")


def axis(name: str, size: int, rank: int) -> Axis:
    """One rank's view of an axis; no collective is called here, so it needs no group."""
    return Axis(name, size, rank, tuple(range(size)), None)


class Weights(nn.Module):
    """One parameter of each kind under fixed names."""

    def __init__(self, tp: Axis, ep: Axis, padded: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        made = {"dtype": dtype, "device": CPU}
        normal = Initialiser("normal", 0.02)
        self.rows = attach(make_parameter((8, 6), Cut(0, tp), **made), normal)
        self.columns = attach(make_parameter((6, 8), Cut(1, tp), **made), normal)
        self.blocks = attach(make_parameter((2, 8, 6), Cut(1, tp), **made), Initialiser("xavier_uniform"))
        self.words = attach(make_parameter((padded, 5), Cut(0, tp), **made), Initialiser("normal", 1.0, valid_rows=7))
        expert = Initialiser("normal", 0.02, per_leading=True)
        self.experts = attach(make_parameter((4, 6, 8), Cut(0, ep), Cut(2, tp), role="expert", **made), expert)
        self.scale = attach(make_parameter((6,), decays=False, **made), ONES)


def weights(tp: Axis, ep: Axis, seed: int = 1, **options: object) -> dict[str, nn.Parameter]:
    module = Weights(tp, ep, **options)
    initialise_weights(module, seed)
    return dict(module.named_parameters())


WHOLE = (axis("tp", 1, 0), axis("ep", 1, 0))


@pytest.mark.parametrize("size", [2, 4])
def test_every_slice_is_a_part_of_the_one_process_weight(size: int) -> None:
    whole = weights(*WHOLE)
    slices: dict[str, list[Tensor]] = {}
    for rank in range(size):
        for name, parameter in weights(axis("tp", size, rank), axis("ep", size, size - 1 - rank)).items():
            box = spec_of(parameter).box
            assert parameter.numel() == whole[name].numel() // size ** len(spec_of(parameter).cuts)
            assert torch.equal(parameter, whole[name][box]), f"{name} on rank {rank}"
            slices.setdefault(name, []).append(parameter)
    for name in ("rows", "columns", "blocks", "experts"):
        assert not torch.equal(slices[name][0], slices[name][1]), f"a repeated slice of {name}"


def test_padding_rows_are_zero_and_change_no_word() -> None:
    words = weights(*WHOLE, padded=8)["words"]
    longer = weights(*WHOLE, padded=16)["words"]
    assert torch.equal(words[:7], longer[:7])
    assert not longer[7:].any()
    assert words[:7].abs().min() > 0


def test_name_and_seed_decide_and_dtype_only_rounds() -> None:
    whole, other = weights(*WHOLE), weights(*WHOLE, seed=2)
    wide, narrow = weights(*WHOLE, dtype=torch.float64), weights(*WHOLE, dtype=torch.bfloat16)
    for name in ("rows", "columns", "blocks", "experts"):
        assert not torch.equal(whole[name], other[name])
        assert torch.equal(whole[name].double(), wide[name])
        assert torch.equal(whole[name].bfloat16(), narrow[name])
    assert not torch.equal(whole["rows"].flatten(), whole["columns"].flatten())
    assert not torch.equal(whole["experts"][0], whole["experts"][1])
    assert torch.equal(whole["scale"], torch.ones(6))


def test_spread_is_that_of_the_kind() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = {"dtype": torch.float32, "device": CPU}
            normal = Initialiser("normal", 0.02).scaled_for_output(8)
            self.normal = attach(make_parameter((400, 300), **made), normal)
            self.xavier = attach(make_parameter((2, 200, 300), **made), Initialiser("xavier_uniform"))

    module = Large()
    initialise_weights(module, 1)
    assert module.normal.std().item() == pytest.approx(0.02 / 4, rel=0.02)  # sqrt(2 * 8)
    bound = math.sqrt(6 / (2 * 200 + 300))
    assert module.xavier.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert module.xavier.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)


def test_first_numbers_stay_as_they_are() -> None:
    """A golden value: a run must start alike on every version (torch's CPU generator, sha256 of "1:rows")."""
    first = weights(*WHOLE)["rows"][0, :3].tolist()
    assert first == pytest.approx([0.0499605648, 0.000164308396, -0.0310118552], rel=1e-6)
