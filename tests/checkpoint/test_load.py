"""Loading on any layout. Reference: slices of the whole tensors of `example.global_values`, bitwise."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_parm.checkpoint.boxes import Box
from megatron_parm.checkpoint.find import find_checkpoint
from megatron_parm.checkpoint.load import has_same_layout, load_rank_tensors, load_tensors, read_state
from megatron_parm.checkpoint.verify import VerifiedCheckpoint
from megatron_parm.errors import CheckpointError
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import ShardSpec
from tests.checkpoint import example
from tests.harness.layouts import SINGLE, Layout
from tests.harness.pools import Pools

LAYOUTS = (
    SINGLE,
    Layout(2, tp=2),
    Layout(2, ep=2),
    Layout(2, pp=2),
    Layout(4, tp=2, esp=2, ep=2),
    Layout(4, tp=4, ep=4),
    Layout(4, tp=1, esp=2),
    Layout(4, tp=2, esp=2, pp=2),
)
CTX = ParallelContext.single()


@pytest.mark.parametrize("saved_on", LAYOUTS, ids=str)
def test_a_checkpoint_of_any_layout_loads_on_any_other(pools: Pools, tmp_path: Path, saved_on: Layout) -> None:
    reports = pools.run(saved_on, example.save, tmp_path, 7, 3)
    assert len({(report.path, report.bytes) for report in reports}) == 1
    for layout in LAYOUTS:
        differing = pools.run(layout, example.differing_after_load, tmp_path, 3)
        assert differing == [[]] * layout.world, f"saved on {saved_on}, loaded on {layout}"


def _load_with_every_box_at_the_origin(ctx: ParallelContext, root: Path) -> list[str]:
    def misplaced(local: torch.Tensor, spec: ShardSpec) -> Box:
        return Box(local, spec.global_shape, (0,) * local.ndim)

    with mock.patch.object(Box, "of", misplaced):
        return example.differing_after_load(ctx, root, 3)


def test_a_wrong_offset_would_be_seen(pools: Pools, tmp_path: Path) -> None:
    """Negative control of the test above."""
    pools.run(SINGLE, example.save, tmp_path, 7, 3)
    first, second = pools.run(Layout(2, tp=2), _load_with_every_box_at_the_origin, tmp_path)
    assert first == []
    assert {"embedding.weight", "layers.0.row.weight"} <= set(second)
    assert "norm.weight" not in second


def _replicated_bytes_on_disk(ctx: ParallelContext, root: Path) -> int:
    return example.save(ctx, root, 1, 3).bytes


def test_a_replicated_tensor_is_written_once(pools: Pools, tmp_path: Path) -> None:
    """Reference: the bytes of the whole tensors; headers take the rest."""
    whole = sum(value.nbytes for value in example.global_values(3).values())
    for layout in (SINGLE, Layout(4), Layout(4, ep=2)):
        saved = pools.run(layout, _replicated_bytes_on_disk, tmp_path / str(layout))[0]
        assert whole < saved < whole + 8192 * layout.world


def _state_and_random(ctx: ParallelContext, root: Path) -> tuple[dict[str, object], list[int]]:
    checkpoint = find_checkpoint(root, ctx)
    assert has_same_layout(checkpoint, ctx)
    return read_state(checkpoint, ctx), load_rank_tensors(checkpoint, ["random"], ctx)["random"].tolist()


def _load_random(ctx: ParallelContext, root: Path) -> None:
    load_rank_tensors(find_checkpoint(root, ctx), ["random"], ctx)


def test_state_and_rank_local_tensors_come_back_to_their_rank(pools: Pools, tmp_path: Path) -> None:
    layout = Layout(4, tp=2)
    pools.run(layout, example.save, tmp_path, 7, 3)
    for rank, (state, random_state) in enumerate(pools.run(layout, _state_and_random, tmp_path)):
        assert state == {"iteration": 7, "seed": 3, "rate": 0.1}
        assert random_state == [10 * rank + place for place in range(6)]
    for other in (SINGLE, Layout(4, tp=4), Layout(4)):
        for kind, code, message in pools.run(other, example.error_of, _load_random, tmp_path):
            assert (kind, code) == ("CheckpointError", 21)
            assert "was saved on the layout {'world': 4, 'pp': 1, 'dp': 2, 'tp': 2" in message


def _saved(tmp_path: Path) -> tuple[VerifiedCheckpoint, example.Tensors]:
    example.save(CTX, tmp_path, 7, 3)
    return find_checkpoint(tmp_path, CTX), example.tensors_of(CTX, 3)


def test_names_shapes_and_dtypes_that_differ_are_refused_in_one_table(tmp_path: Path) -> None:
    """FC-20: nothing is loaded, and the message lists each difference with both values."""
    checkpoint, wanted = _saved(tmp_path)
    del wanted["mask"]
    wanted["extra.weight"] = wanted["norm.weight"]
    row, spec = wanted["layers.0.row.weight"]
    wanted["layers.0.row.weight"] = (row[:, :8].contiguous(), replace(spec, global_shape=(8, 8)))
    wanted["norm.weight"] = (wanted["norm.weight"][0].float(), wanted["norm.weight"][1])
    blank = example.blank(wanted)
    with pytest.raises(CheckpointError) as caught:
        load_tensors(checkpoint, blank, CTX)
    message = str(caught.value)
    assert "layers.0.row.weight: checkpoint [8, 16] float32, model [8, 8] float32" in message
    assert "norm.weight: checkpoint [8] float64, model [8] float32" in message
    assert "in the model, not in the checkpoint (1):\n  extra.weight" in message
    assert "in the checkpoint, not in the model (1):\n  mask [5] bool" in message
    assert blank["embedding.weight"][0].isnan().all(), "something was loaded all the same"


def test_a_long_table_fits_on_a_screen(tmp_path: Path) -> None:
    checkpoint, wanted = _saved(tmp_path)
    renamed = {f"other.{name}": value for name, value in wanted.items()}
    with pytest.raises(CheckpointError, match="and 12 more") as caught:
        load_tensors(checkpoint, renamed, CTX)
    assert str(caught.value).count("\n") < 40


def test_a_partial_load_reports_what_it_left_out(tmp_path: Path) -> None:
    checkpoint, wanted = _saved(tmp_path)
    expected = wanted.pop("norm.weight")[0]
    blank = example.blank(wanted | {"extra.weight": (expected, ShardSpec((8,), (), "dense", False))})
    report = load_tensors(checkpoint, blank, CTX, partial=True)
    assert (report.missing, report.unexpected) == (("extra.weight",), ("norm.weight",))
    assert blank["extra.weight"][0].isnan().all()
    assert torch.equal(blank["layers.1.row.weight"][0], wanted["layers.1.row.weight"][0])


def test_prefixes_that_are_not_wanted_and_another_dtype(tmp_path: Path) -> None:
    checkpoint, wanted = _saved(tmp_path)
    some = {name: (local.double(), spec) for name, (local, spec) in wanted.items() if name.endswith("row.weight")}
    blank = example.blank(some)
    others = [name for name in wanted if name not in some]
    load_tensors(checkpoint, blank, CTX, ignored_prefixes=others, convert=True)
    assert all(torch.equal(blank[name][0], some[name][0]) for name in some)


def test_loading_fills_parameters_and_strided_tensors_in_place(tmp_path: Path) -> None:
    """A view into a larger buffer, a transposed tensor and a leaf that requires grad, all filled where they lie."""
    checkpoint, wanted = _saved(tmp_path)
    expected = wanted["layers.0.row.weight"][0]
    buffer = torch.full((16, 9), float("nan"))
    wanted["layers.0.row.weight"] = (buffer[:, :8].t(), wanted["layers.0.row.weight"][1])
    norm = torch.nn.Parameter(torch.zeros(8, dtype=torch.float64))
    wanted["norm.weight"] = (norm, wanted["norm.weight"][1])
    load_tensors(checkpoint, wanted, CTX)
    assert torch.equal(buffer[:, :8].t(), expected)
    assert buffer[:, 8].isnan().all()
    assert torch.equal(norm, example.global_values(3)["norm.weight"])


def test_a_damaged_state_is_found_even_if_only_sizes_were_checked(tmp_path: Path) -> None:
    example.save(CTX, tmp_path, 7, 3)
    file = tmp_path / "iter_0000007" / "state.json"
    file.write_text(file.read_text().replace('"seed": 3', '"seed": 4'))
    with pytest.raises(CheckpointError, match=r"state\.json is damaged: it has the SHA-256 .* expected"):
        read_state(find_checkpoint(tmp_path, CTX, verify="size"), CTX)
