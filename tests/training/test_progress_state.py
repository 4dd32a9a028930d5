"""The counters of a run survive their JSON form, and nothing else passes for them."""

import json

import pytest

from megatron_parm.errors import CheckpointError
from megatron_parm.training.progress_state import RunProgress


def test_round_trip() -> None:
    progress = RunProgress(3, 24, 16, 16, 1)
    assert RunProgress.from_state(json.loads(json.dumps(progress.to_state()))) == progress


@pytest.mark.parametrize("value", [None, -1, 1.5, "3", True])
def test_what_is_no_count_is_refused_by_name(value: object) -> None:
    state = {**RunProgress().to_state(), "consumed_train_samples": value}
    with pytest.raises(CheckpointError, match="consumed_train_samples"):
        RunProgress.from_state(state)
