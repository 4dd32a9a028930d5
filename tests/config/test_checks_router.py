"""config/checks_router.py: what does not go together, with the flags, the values and a remedy that works."""

import re

import pytest

from megatron_parm.config.run import check_run
from megatron_parm.errors import ConfigError
from tests.config.commands import config_of, notes_of

EIGHT = "--num-experts 8"
SIGMOID = "--moe-router-score-function sigmoid"
SINKHORN = "--moe-router-load-balancing-type sinkhorn"
UPCYCLED = f"{EIGHT} --moe-use-upcycling --load somewhere"

REFUSED = [
    (1, "--num-experts 4 --moe-router-topk 5", ["--moe-router-topk 5", "--num-experts 4"]),
    (1, "--num-experts 4 --moe-router-topk 1", ["--moe-router-topk 1", "--moe-router-pre-softmax"]),
    (1, f"{EIGHT} --moe-router-enable-expert-bias", ["--moe-router-score-function sigmoid"]),
    (1, f"{EIGHT} --moe-router-num-groups 4", ["--moe-router-num-groups 4", "--moe-router-group-topk"]),
    (1, f"{EIGHT} --moe-router-group-topk 2", ["--moe-router-group-topk 2", "--moe-router-num-groups"]),
    (
        1,
        f"{EIGHT} --moe-router-num-groups 3 --moe-router-group-topk 1",
        ["--num-experts 8", "groups 3", "1, 2, 4 or 8"],
    ),
    (1, f"{EIGHT} --moe-router-num-groups 4 --moe-router-group-topk 3", ["--moe-router-group-topk 3", "1 or 2"]),
    (1, f"{EIGHT} --moe-router-num-groups 8 --moe-router-group-topk 1", ["of 1 experts each", "group-topk 2"]),
    (1, f"{EIGHT} {SINKHORN} --moe-aux-loss-coeff 0.1", ["sinkhorn", "--moe-aux-loss-coeff must be 0, not 0.1"]),
    (1, f"{EIGHT} {SINKHORN} --moe-expert-capacity-factor 2", ["sinkhorn", "--moe-expert-capacity-factor"]),
    (1, f"{EIGHT} {SINKHORN} {SIGMOID}", ["sinkhorn", SIGMOID]),
    (1, f"{EIGHT} {SINKHORN} --moe-router-topk-scaling-factor 2", ["sinkhorn", "scaling-factor"]),
    (1, f"{EIGHT} --moe-shared-expert-gate", ["--moe-shared-expert-intermediate-size"]),
    (4, f"{EIGHT} --tensor-model-parallel-size 4 --moe-shared-expert-intermediate-size 6", ["size 6", "size 8"]),
    (1, f"{EIGHT} --moe-use-upcycling", ["--moe-use-upcycling needs --load"]),
    (1, f"{UPCYCLED} --moe-router-pre-softmax", ["sum to 1", "--moe-router-pre-softmax"]),
    (1, f"{UPCYCLED} --moe-router-topk-scaling-factor 2", ["sum to 1", "scaling-factor"]),
    (1, f"{UPCYCLED} {SIGMOID} --moe-router-topk 1", ["sum to 1", "--moe-router-topk of 2 or more"]),
    (1, f"{UPCYCLED} --moe-ffn-hidden-size 12", ["--moe-ffn-hidden-size 12", "--ffn-hidden-size"]),
    (1, f"{UPCYCLED} --moe-shared-expert-intermediate-size 8", ["--moe-shared-expert-intermediate-size"]),
]

ACCEPTED = [
    (1, f"{EIGHT} {SIGMOID} --moe-router-topk 1"),
    (1, f"{EIGHT} {SINKHORN} --moe-router-topk 1"),
    (1, f"{EIGHT} {SIGMOID} --moe-router-enable-expert-bias --moe-router-bias-update-rate 0"),
    (1, f"{EIGHT} --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5"),
    (1, f"{EIGHT} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1"),
    (2, f"{EIGHT} --tensor-model-parallel-size 2 --moe-shared-expert-intermediate-size 6 --moe-shared-expert-gate"),
    (1, f"{UPCYCLED} {SIGMOID}"),
    (1, f"{UPCYCLED} --moe-router-topk-scaling-factor 1 --moe-upcycling-granularity 1"),
]


@pytest.mark.parametrize(("world", "flags", "named"), REFUSED, ids=[row[1] for row in REFUSED])
def test_settings_that_do_not_go_together(world: int, flags: str, named: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check_run(config_of(flags), world)
    for text in named:
        assert text in str(error.value)


@pytest.mark.parametrize(("world", "flags", "_named"), REFUSED, ids=[row[1] for row in REFUSED])
def test_a_proposed_value_works(world: int, flags: str, _named: list[str]) -> None:
    """Take the first `use --flag N` of a message: with it, the same complaint is gone."""
    with pytest.raises(ConfigError) as before:
        check_run(config_of(flags), world)
    proposal = re.search(r"use (--[a-z-]+) (\d+)", str(before.value))
    if proposal is None:
        return
    try:
        check_run(config_of(f"{flags} {proposal[1]} {proposal[2]}"), world)
    except ConfigError as after:
        assert str(after).split()[0] != str(before.value).split()[0]


@pytest.mark.parametrize(("world", "flags"), ACCEPTED, ids=[row[1] for row in ACCEPTED])
def test_settings_that_go_together(world: int, flags: str) -> None:
    check_run(config_of(flags), world)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type none", "--moe-aux-loss-coeff: no effect"),
        (f"--moe-router-pre-softmax {SIGMOID}", "--moe-router-pre-softmax: no effect"),
        ("--moe-router-force-load-balancing", "by turns"),
        ("--moe-use-upcycling --moe-expert-capacity-factor 1", "dropped tokens miss the feed-forward"),
    ],
)
def test_what_does_less_than_one_may_think_is_said(flags: str, told: str) -> None:
    assert any(told in note for note in notes_of(f"{EIGHT} {flags}"))


def test_megatrons_list_of_losses_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="keep one of them"):
        config_of(f"{EIGHT} --moe-router-load-balancing-type aux_loss seq_aux_loss")
