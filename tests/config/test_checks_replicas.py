"""config/checks_replicas.py. Reference: what each message must name; a combination that works beside each refusal."""

import pytest

from megatron_parm.config.run import check_run
from megatron_parm.errors import ConfigError
from tests.config.commands import config_of, notes_of


@pytest.mark.parametrize(
    ("refused", "message", "works"),
    [
        (
            "--overlap-param-gather",
            "--overlap-param-gather needs --use-distributed-optimizer",
            "--overlap-param-gather --use-distributed-optimizer",
        ),
        (
            "--grad-reduce-in-bf16",
            "--grad-reduce-in-bf16 with fp32.*use it with --bf16",
            "--grad-reduce-in-bf16 --bf16",
        ),
        (
            "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
            "two precisions of one reduction; keep one",
            "--bf16 --fp32-allreduce",
        ),
        (
            "--fp16 --initial-loss-scale 2 --min-loss-scale 4",
            "--min-loss-scale 4.0 is more than --initial-loss-scale 2.0; use --initial-loss-scale 4.0",
            "--fp16 --initial-loss-scale 4 --min-loss-scale 4",
        ),
    ],
)
def test_what_cannot_work_is_refused_and_the_remedy_works(refused: str, message: str, works: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(config_of(refused), 4)
    check_run(config_of(works), 4)


def test_settings_without_effect_are_said() -> None:
    assert notes_of("--fp16 --loss-scale-window 10") == []
    assert notes_of("--bf16 --loss-scale-window 10") == [
        "--loss-scale-window: no effect with bf16, only fp16 needs a loss scale"
    ]
    assert "--moe-grad-reduce: no effect" in notes_of("--moe-grad-reduce anywhere")[0]
    assert notes_of("--moe-grad-reduce anywhere --overlap-grad-reduce --num-experts 4") == []
