"""config/moe.py. Reference: Megatron-Core's defaults, and what docs/flags.md says of chunks."""

import pytest

from megatron_parm.config.moe import MoEConfig
from megatron_parm.errors import ConfigError
from megatron_parm.moe.schedules import SCHEDULES
from tests.config.commands import config_of, notes_of


def test_defaults_are_megatrons() -> None:
    moe = MoEConfig(num_experts=4)
    assert moe.moe_router_topk == 2
    assert moe.moe_router_load_balancing_type == "aux_loss"
    assert moe.moe_aux_loss_coeff == 0.0
    assert moe.moe_z_loss_coeff is None
    assert moe.moe_token_drop_policy == "probs"
    assert moe.layer_pattern(3) == (True, True, True)
    assert moe.capacity_factor is None


@pytest.mark.parametrize(
    ("train", "evaluation", "expected"),
    [
        (None, None, (None, None)),
        (1.5, None, (1.5, 1.5)),
        (-1.0, None, (None, None)),
        (1.5, -1.0, (1.5, None)),
        (None, 2.0, (None, 2.0)),
    ],
)
def test_capacity_negative_is_no_limit_and_evaluation_follows_training(
    train: float | None, evaluation: float | None, expected: tuple[float | None, float | None]
) -> None:
    moe = MoEConfig(num_experts=4, moe_expert_capacity_factor=train, moe_eval_capacity_factor=evaluation)
    assert (moe.capacity_factor, moe.eval_capacity_factor) == expected


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [("auto", None, None), ("s1", None, 1), ("s1", "auto", None), ("auto", "1", 1), ("s1", "3", 3)],
)
def test_a_fixed_schedule_runs_in_one_chunk_unless_told(schedule, chunks, expected) -> None:
    assert MoEConfig(num_experts=4, moe_schedule=schedule, moe_pipeline_chunks=chunks).pipeline_chunks == expected


@pytest.mark.parametrize("chunks", ["0", "-1", "x", "1.5", ""])
def test_chunks_are_a_number_or_auto(chunks: str) -> None:
    with pytest.raises(ConfigError, match="--moe-pipeline-chunks"):
        config_of(f"--num-experts 4 --moe-pipeline-chunks={chunks}")


def test_no_experts_is_a_dense_model() -> None:
    assert config_of().moe is None
    assert config_of("--num-experts 0").moe is None
    assert config_of("--num-experts 8").moe == MoEConfig(num_experts=8)
    assert notes_of("--moe-router-topk 3") == ["--moe-router-topk: no effect without --num-experts"]


def test_deepspeeds_list_of_experts_must_be_one_number() -> None:
    assert config_of("--num-experts 8 8").moe == MoEConfig(num_experts=8)
    with pytest.raises(ConfigError, match="--num-experts 4 8: expected one whole number"):
        config_of("--num-experts 4 8")


def test_every_schedule_of_the_moe_room_has_its_flag() -> None:
    for schedule in ("auto", *SCHEDULES):
        moe = config_of(f"--num-experts 4 --moe-schedule {schedule} --pipeline-degree 3").moe
        assert moe is not None and (moe.moe_schedule, moe.pipeline_chunks) == (schedule, 3)
