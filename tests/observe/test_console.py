"""Reference: Megatron-LM 2.5's format strings, and a line of a public Megatron log taken apart and rebuilt."""

import math
import re
from dataclasses import replace

import pytest

from megatron_parm.observe.console import ConsoleSink, perplexity, train_line, valid_lines
from megatron_parm.observe.flops import Throughput
from megatron_parm.observe.records import TrainRecord, ValidRecord
from tests.observe.fixtures import END, SAVE, START, TRAIN

# Printed by Megatron-LM 2.x, from a public training report (its padding as the format strings give it).
PUBLIC_LINE = (
    " iteration       50/    1000 | consumed samples:          200 | elapsed time per iteration (ms): 661.3 |"
    " learning rate: 1.497E-04 | global batch size:     4 | lm loss: 8.238016E+00 | loss scale: 16384.0 |"
    " grad norm: 2.555 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_a_public_line_to_the_letter():
    record = TrainRecord(
        iteration=50,
        train_iters=1000,
        consumed_samples=200,
        global_batch_size=4,
        losses={"lm loss": 8.238016},
        learning_rate=1.497e-4,
        loss_scale=16384.0,
        iteration_time_ms=661.3,
        throughput=Throughput(6.0, 6000.0, 1.0, 0.25),
        grad_norm=2.555,
    )
    assert train_line(record) == PUBLIC_LINE


def test_every_field_in_megatrons_order():
    assert train_line(TRAIN, is_throughput_shown=True) == (
        " iteration        3/      20 | consumed samples:           24 | elapsed time per iteration (ms): 12.3 |"
        " throughput per GPU (TFLOP/s/GPU): 0.1 | learning rate: 1.500E-04 | global batch size:     8 |"
        " lm loss: 3.333333E-01 | load_balancing_loss: 1.250000E+00 | loss scale: 1.0 | grad norm: 2.500 |"
        " num zeros: 7.0 | params norm: 11.125 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_users_parsers_find_their_fields():
    """The regular expressions of common log parsers, on a line with everything on."""
    line = train_line(TRAIN, is_throughput_shown=True)
    found = re.search(r"iteration\s+(\d+)/\s+\d+ \|.*elapsed time per iteration \(ms\): ([\d.]+) \|", line)
    assert found and found.groups() == ("3", "12.3")
    assert re.search(r"lm loss: ([\d.E+-]+) \|", line).group(1) == "3.333333E-01"
    assert [part.split(":")[0].strip() for part in line.split(" | ")][-1] == "number of nan iterations"


def test_the_validation_line_between_rules():
    rule, line, below = valid_lines(ValidRecord(10, 80, {"lm loss": math.log(8.0)}))
    assert line == " validation loss at iteration 10 | lm loss value: 2.079442E+00 | lm loss PPL: 8.000000E+00 | "
    assert rule == below == "-" * (len(line) + 1)
    test = ValidRecord(10, 80, {"lm loss": 1.0}, split="test", place="the end of training for test data")
    assert valid_lines(test)[1].startswith(" validation loss at the end of training for test data | lm loss value: ")


def test_perplexity_is_capped_as_in_megatron():
    assert perplexity(1000.0) == math.exp(20.0)
    assert math.isnan(perplexity(math.nan))


def said(records, **options):
    lines = []
    sink = ConsoleSink(lines.append, **options)
    for record in records:
        sink.write(record)
    return lines


def step(iteration, loss, **changes):
    return replace(TRAIN, iteration=iteration, losses={"lm loss": loss}, spans_ms={}, **changes)


def test_an_interval_prints_the_means_of_its_iterations():
    steps = [step(i, loss, iteration_time_ms=time) for i, loss, time in ((1, 4.0, 10.0), (2, 2.0, 30.0), (3, 9.0, 5.0))]
    (line,) = said(steps, interval=2)
    assert "iteration        2/" in line
    assert "elapsed time per iteration (ms): 20.0 |" in line
    assert "lm loss: 3.000000E+00 |" in line


def test_a_skipped_iteration_is_counted_and_its_loss_left_out():
    (line,) = said([step(1, math.nan, skipped=1, nan=1), step(2, 2.0)], interval=2)
    assert "lm loss: 2.000000E+00 |" in line
    assert line.endswith("number of skipped iterations:   1 | number of nan iterations:   1 |")
    (line,) = said([step(2, math.inf, skipped=1)], interval=2)
    assert "lm loss" not in line


def test_throughput_of_an_interval_is_work_over_time():
    speeds = [step(1, 1.0, iteration_time_ms=10.0), step(2, 1.0, iteration_time_ms=30.0)]
    speeds = [
        replace(record, throughput=Throughput(1, 1, 1, speed))
        for record, speed in zip(speeds, (40.0, 20.0), strict=True)
    ]
    (line,) = said(speeds, interval=2, is_throughput_shown=True)
    assert "throughput per GPU (TFLOP/s/GPU): 25.0 |" in line  # (40*10 + 20*30) / 40


@pytest.mark.parametrize(
    ("option", "lines"),
    [
        ("max", ["max time across ranks (ms):", f"    forward {'.' * 40}: 4.00", f"    backward {'.' * 39}: 8.00"]),
        (
            "minmax",
            [
                "(min, max) time across ranks (ms):",
                f"    forward {'.' * 40}: (3.00, 4.00)",
                f"    backward {'.' * 39}: (8.00, 8.00)",
            ],
        ),
        (
            "all",
            [
                "times across ranks (ms):",
                *("  forward:", "     rank  0: 4.00", "     rank  1: 3.00"),
                *("  backward:", "     rank  0: 8.00", "     rank  1: 8.00"),
            ],
        ),
    ],
)
def test_timers_have_megatrons_lines(option, lines):
    assert said([TRAIN], timing_option=option)[1:] == lines


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (SAVE, "successfully saved checkpoint at iteration       3 to runs/a/iter_0000003"),
        (START, "MoE schedule: s1 in 1 chunk (s1: 4.1 ms predicted, s2 5.0 ms)"),
        (START, "parameters: 1,234,567 in all, at most 400,000 on a rank"),
        (END, "ended at iteration 20: --train-iters reached (9.5 s)"),
    ],
)
def test_other_events(record, expected):
    assert expected in "\n".join(said([record]))
