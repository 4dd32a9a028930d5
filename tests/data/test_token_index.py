"""Document, sample and shuffle indices. Reference: Megatron's arrays for five documents, and a token-by-token walk."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_parm.data.token_index import (
    build_token_index,
    document_dtype,
    plan_epochs,
    sample_dtype,
    shuffle_dtype,
)
from megatron_parm.errors import DataError

LENGTHS = np.array([7, 4, 9, 3, 6], dtype=np.int32)
KNOWN = [
    # samples, epochs, last epoch separate, document index, sample index, shuffle index
    (3, 1, False, [4, 0, 1, 2, 3], [[0, 0], [1, 2], [2, 3], [3, 7]], [1, 2, 0]),
    (
        4,
        2,
        True,
        [4, 0, 1, 2, 3, 3, 2, 1, 0, 4],
        [[0, 0], [1, 2], [2, 3], [3, 7], [6, 0], [6, 8], [8, 3], [9, 4]],
        [0, 2, 1, 6, 3, 5, 4],
    ),
    (
        5,
        2,
        False,
        [2, 2, 4, 1, 0, 3, 4, 0, 1, 3],
        [[0, 0], [0, 8], [1, 7], [3, 0], [4, 4], [6, 2], [7, 4], [9, 1]],
        [6, 4, 0, 5, 3, 2, 1],
    ),
    (9, 3, False, [3, 1, 0, 2, 4, 2, 0, 2, 1, 4, 3, 4, 0, 1, 3], None, [3, 9, 2, 1, 7, 5, 4, 0, 8, 6]),
]


@pytest.mark.parametrize(("samples", "epochs", "separate", "document", "sample", "shuffle"), KNOWN)
def test_known_answers(samples, epochs, separate, document, sample, shuffle) -> None:
    plan = plan_epochs(29, 8, samples, "x")
    assert (plan.epochs, plan.is_last_epoch_separate) == (epochs, separate)
    index = build_token_index(LENGTHS, np.arange(5), plan, seed=1234)
    assert index.document.tolist() == document and index.document.dtype == np.int32
    assert sample is None or index.sample.tolist() == sample
    assert index.sample.dtype == np.int32
    assert index.shuffle.tolist() == shuffle and index.shuffle.dtype == np.uint32


@pytest.mark.parametrize(("samples", "separate"), [(10, False), (11, True), (17, True), (18, False), (20, False)])
def test_the_last_epoch_is_separate_below_four_fifths(samples, separate) -> None:
    plan = plan_epochs(101, 10, samples, "x")  # 10 samples an epoch; 0.80 of them are 8
    assert plan.is_last_epoch_separate is separate


def walk(lengths, document, sequence_length, total):
    """The rows by walking through the documents: seq + 1 tokens on, one token back; never on to the next document."""
    rows, position, offset = [[0, 0]], 0, 0
    for _ in range(total):
        need = sequence_length + 1
        while need:
            rest = lengths[document[position]] - offset
            if rest >= need:
                offset, need = offset + need - 1, 0
            else:
                need, position, offset = need - rest, position + 1, 0
        rows.append([position, offset])
    return rows


def test_rows_equal_a_walk_through_the_tokens() -> None:
    @settings(max_examples=150, derandomize=True, deadline=None)
    @given(
        st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 0),
        st.integers(1, 9),
        st.integers(1, 40),
        st.integers(0, 5),
    )
    def check(sizes, sequence_length, samples, seed) -> None:
        lengths = np.array(sizes, dtype=np.int32)
        plan = plan_epochs(sum(sizes), sequence_length, samples, "x")
        assert plan.total_samples >= samples
        assert plan.epochs == 1 or plan.samples_before_last_epoch < samples
        index = build_token_index(lengths, np.arange(len(sizes)), plan, seed)
        assert index.sample.tolist() == walk(sizes, index.document, sequence_length, plan.total_samples)
        assert sorted(index.shuffle.tolist()) == list(range(plan.total_samples))
        assert np.bincount(index.document, minlength=len(sizes)).tolist() == [plan.epochs] * len(sizes)

    check()


def test_a_part_of_the_sequences() -> None:
    plan = plan_epochs(12, 4, None, "x")
    index = build_token_index(LENGTHS, np.arange(2, 4), plan, seed=1)
    assert sorted(index.document.tolist()) == [2, 3]
    assert len(index) == plan.samples_per_epoch == 2


def test_samples_are_windows_not_documents() -> None:  # FC-07
    plan = plan_epochs(70, 16, 8, "x")
    assert (plan.samples_per_epoch, plan.epochs) == (4, 2)
    assert plan_epochs(71, 5, 14, "x").epochs == 1
    assert plan_epochs(70, 5, 14, "x").epochs == 2  # 14 samples need 71 tokens


def test_index_types_are_wide_enough() -> None:  # FC-06
    assert sample_dtype(2**31 - 1, 5) == np.int32
    assert sample_dtype(2**31, 5) == np.int64
    assert sample_dtype(5, 2**31) == np.int64
    assert shuffle_dtype(2**32 - 3) == np.uint32
    assert shuffle_dtype(2**32 - 2) == np.int64
    assert document_dtype(2**31 - 1) == np.int32
    assert document_dtype(2**31) == np.int64


def test_lengths_are_summed_in_64_bits() -> None:  # FC-06
    lengths = np.full(5, 2**31 - 1, dtype=np.int32)
    plan = plan_epochs(int(lengths.sum(dtype=np.int64)), 2**30, None, "x")
    index = build_token_index(lengths, np.arange(5), plan, seed=0)
    token = index.sample[:, 0].astype(np.int64) * (2**31 - 1) + index.sample[:, 1]
    assert token.tolist() == [number * 2**30 for number in range(plan.total_samples + 1)]


@pytest.mark.parametrize(("tokens", "samples", "message"), [(0, 5, "holds no tokens"), (8, None, "make no sample")])
def test_too_little_data_is_named(tokens, samples, message) -> None:
    with pytest.raises(DataError, match=f"the train split of x.*{message}"):
        plan_epochs(tokens, 8, samples, "the train split of x")


def test_a_million_documents_take_a_moment() -> None:
    """10 million take 1.7 s on an idle core; a tenth of them within 5 s even on a busy one. A Python loop takes 10."""
    lengths = np.random.default_rng(0).integers(1, 1000, 1_000_000).astype(np.int32)
    start = time.process_time()
    plan = plan_epochs(int(lengths.sum(dtype=np.int64)), 256, None, "x")
    index = build_token_index(lengths, np.arange(len(lengths)), plan, seed=1234)
    assert len(index) == plan.total_samples > 1_900_000
    assert time.process_time() - start < 5
