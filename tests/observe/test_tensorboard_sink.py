"""Reference: TensorBoard's own reader, and the tag names of Megatron-LM 2.5."""

from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_parm.observe.tensorboard_sink import TensorBoardSink, TensorBoardTags
from tests.observe.fixtures import ALL_RECORDS, TRAIN

ALWAYS = {"learning-rate", "lm loss", "load_balancing_loss", "loss-scale", "grad-norm", "num-zeros", "params-norm"}
OURS = {"moe-drop-rate", "moe-max-load", "moe-router-entropy"}
VALIDATION = {"lm loss validation"}
OPTIONAL = {
    "batch-size",
    "iteration-time",
    "forward-time",
    "backward-time",
    "throughput",
    "mem-max-allocated-bytes",
    "mem-max-resident-bytes",
    "lm loss validation ppl",
}


def written(folder, tags, records=ALL_RECORDS, **options):
    sink = TensorBoardSink(folder, tags, **options)
    for record in records:
        sink.write(record)
    sink.close()
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return reader


def both(names):
    return names | {f"{name} vs samples" for name in names}


@pytest.mark.parametrize("is_everything", [False, True])
def test_tags_are_megatrons_each_also_against_samples(tmp_path, is_everything):
    reader = written(tmp_path, TensorBoardTags(*[True] * 7) if is_everything else TensorBoardTags())
    expected = both(ALWAYS | OURS | VALIDATION | (OPTIONAL if is_everything else set()))
    assert set(reader.Tags()["scalars"]) == expected


def test_values_and_steps(tmp_path):
    reader = written(tmp_path, TensorBoardTags(timers=True, memory=True))

    def point(tag):
        (event,) = reader.Scalars(tag)
        return event.step, event.value

    assert point("grad-norm") == (3, 2.5)
    assert point("grad-norm vs samples") == (24, 2.5)
    assert point("lm loss validation") == (3, pytest.approx(9.2, rel=1e-6))  # TensorBoard keeps float32
    assert point("iteration-time") == (3, pytest.approx(0.01234, rel=1e-6))  # seconds
    assert point("mem-max-allocated-bytes") == (3, 2.0 * 2**20)


def test_the_interval_thins_training_scalars(tmp_path):
    records = [replace(TRAIN, iteration=i) for i in range(1, 7)]
    reader = written(tmp_path, None, records, interval=3)
    assert [event.step for event in reader.Scalars("lm loss")] == [3, 6]
