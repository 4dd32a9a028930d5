"""From flags to datasets. Reference: datasets put together by hand, and the numbers of FC-07 and FC-36."""

import numpy as np
import pytest

from megatron_parm.data.build import GPTDataRules, build_gpt_datasets, split_requests
from megatron_parm.data.gpt_dataset import DocumentRules, GPTDataset
from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.data.token_index import build_token_index, plan_epochs
from megatron_parm.errors import ConfigError, DataError
from tests.data.corpora import numbered_documents, write_documents

EOD = 9999


def rules(cache=None, **changes) -> GPTDataRules:
    return GPTDataRules(16, 1234, 10000, DocumentRules(EOD), data_cache_path=cache, **changes)


def corpus(folder, name="x", lengths=(7,) * 40):
    return write_documents(folder / name, numbered_documents(lengths, EOD))


def tokens_of(dataset):
    return [dataset[number]["tokens"].tolist() for number in range(len(dataset))]


def test_three_splits_equal_datasets_made_by_hand(tmp_path) -> None:
    prefix = corpus(tmp_path)
    built = build_gpt_datasets([prefix], (20, 3, 2), rules(), split="80,10,10")
    source = IndexedDataset(prefix)
    for dataset, (start, stop), request in zip(
        (built.train, built.valid, built.test), ((0, 32), (32, 36), (36, 40)), (20, 3, 2), strict=True
    ):
        plan = plan_epochs((stop - start) * 7, 16, request, prefix)
        index = build_token_index(source.lengths, np.arange(start, stop), plan, 1234)
        assert tokens_of(dataset) == tokens_of(GPTDataset(source, index, 16, DocumentRules(EOD)))
    assert (tmp_path / "cache" / "GPTDataset_indices").is_dir()


def test_the_summary_tells_samples_from_documents(tmp_path) -> None:  # FC-07
    built = build_gpt_datasets([corpus(tmp_path, lengths=(7,) * 10)], (8, 0, 0), rules(), split="100,0,0")
    assert built.valid is None and built.test is None
    (summary,) = built.summaries
    text = str(summary)
    assert "10 documents, 70 tokens; 4 samples of 16 tokens per epoch; 8 asked for: 2 epochs, 8 samples" in text


@pytest.mark.parametrize(
    ("iterations", "samples", "expected"),
    [(10, None, (40, 24, 8)), (None, 40, (40, 24, 8)), (8, None, (32, 24, 8)), (7, None, (28, 16, 8))],
)
def test_split_requests(iterations, samples, expected) -> None:  # FC-36
    assert split_requests(4, 4, 2, iterations, samples) == expected


def test_a_corpus_written_anew_is_never_read_through_the_old_index(tmp_path) -> None:  # FC-08
    cache = tmp_path / "cache"
    prefix = corpus(tmp_path, lengths=(7,) * 40)
    first = build_gpt_datasets([prefix], (8, 0, 0), rules(cache), split="1").train
    corpus(tmp_path, lengths=(5, 9) * 20)
    second = build_gpt_datasets([prefix], (8, 0, 0), rules(cache), split="1").train
    fresh = build_gpt_datasets([prefix], (8, 0, 0), rules(tmp_path / "other"), split="1").train
    assert tokens_of(second) == tokens_of(fresh) != tokens_of(first)


def test_a_second_start_reads_the_cache(tmp_path, monkeypatch) -> None:
    prefix = corpus(tmp_path)
    first = build_gpt_datasets([prefix], (20, 3, 0), rules(), split="9,1")
    monkeypatch.setattr("megatron_parm.data.build.build_token_index", None)
    again = build_gpt_datasets([prefix], (20, 3, 0), rules(), split="9,1")
    assert tokens_of(again.train) == tokens_of(first.train)


@pytest.mark.parametrize("change", [{"seed": 1}, {"sequence_length": 8}])
def test_seed_and_length_are_part_of_the_key(tmp_path, change) -> None:
    prefix = corpus(tmp_path)
    first = build_gpt_datasets([prefix], (20, 0, 0), rules(), split="1")
    values = {"sequence_length": 16, "seed": 1234, "vocab_size": 10000, "documents": DocumentRules(EOD)} | change
    other = build_gpt_datasets([prefix], (20, 0, 0), GPTDataRules(**values), split="1")
    assert tokens_of(other.train) != tokens_of(first.train)


def test_an_id_outside_the_vocabulary_stops_the_build(tmp_path) -> None:
    prefix = corpus(tmp_path)
    with pytest.raises(DataError, match=rf"x.bin: token id {EOD} at place 6 of sequence 0"):
        build_gpt_datasets([prefix], (8, 0, 0), GPTDataRules(16, 1, EOD, DocumentRules()), split="1")


def test_an_empty_split_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"the valid split of .*x is empty: --split 100,0,0"):
        build_gpt_datasets([corpus(tmp_path)], (8, 8, 0), rules(), split="100,0,0")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(DataError, match=r"/no/such.idx does not exist"):
        build_gpt_datasets(["/no/such"], (8, 0, 0), rules())


def test_sources_are_given_once(tmp_path) -> None:
    prefix = corpus(tmp_path)
    with pytest.raises(ConfigError, match="no data is given: use --data-path"):
        build_gpt_datasets([], (8, 0, 0), rules())
    with pytest.raises(ConfigError, match="--data-path and --mock-data"):
        build_gpt_datasets([prefix], (8, 0, 0), rules(), mock_data=True)
    with pytest.raises(ConfigError, match="--data-path and --train-data-path"):
        build_gpt_datasets([prefix], (8, 0, 0), rules(), paths_by_split=([prefix], [], []))
    with pytest.raises(ConfigError, match="--train-data-path needs"):
        build_gpt_datasets([], (8, 8, 0), rules(), paths_by_split=([], [prefix], []))


def test_one_path_for_each_split(tmp_path) -> None:
    first, second = corpus(tmp_path, "a"), corpus(tmp_path, "b", (9,) * 20)
    built = build_gpt_datasets([], (None, None, 0), rules(), paths_by_split=([first], [second], []))
    assert (len(built.train), len(built.valid)) == ((40 * 7 - 1) // 16, (20 * 9 - 1) // 16)
    assert built.test is None and built.notes == ()


def test_a_split_without_a_path_is_told_and_has_no_dataset(tmp_path) -> None:
    built = build_gpt_datasets([], (8, 8, 8), rules(), paths_by_split=([corpus(tmp_path)], [], []))
    assert built.train is not None and built.valid is None and built.test is None
    assert [note.split(" is given")[0] for note in built.notes] == ["no --valid-data-path", "no --test-data-path"]


def test_plain_reads_give_the_samples_of_memory_maps(tmp_path) -> None:
    prefix = corpus(tmp_path, lengths=range(3, 40))
    mapped, plain = (
        build_gpt_datasets([prefix], (40, 5, 0), rules(maps_tokens=maps), split="8,2") for maps in (True, False)
    )
    assert tokens_of(plain.train) == tokens_of(mapped.train)
    assert tokens_of(plain.valid) == tokens_of(mapped.valid)


def test_a_blend_takes_its_shares(tmp_path) -> None:
    first = write_documents(tmp_path / "a", [[1] * 40] * 20)
    second = write_documents(tmp_path / "b", [[2] * 40] * 20)
    train = build_gpt_datasets(["0.3", first, "0.7", second], (20, 0, 0), rules(), split="1").train
    assert [row[0] for row in tokens_of(train)] == [2, 1, 2, 2, 1, 2, 2, 1, 2, 2, 1, 2, 2, 2, 1, 2, 2, 1, 2, 2]
    by_size = build_gpt_datasets([first, second], (20, 0, 0), rules(), split="1").train
    assert sum(row[0] for row in tokens_of(by_size)) == 30
    whole = build_gpt_datasets([first, second], (None, 0, 0), rules(), split="1").train
    assert len(whole) == 2 * ((20 * 40 - 1) // 16)


def test_mock_data() -> None:
    built = build_gpt_datasets([], (8, 8, 8), rules(), mock_data=True)
    assert built.train is not None and len(built.train) >= 8
    assert built.train[0]["tokens"].shape == (16,)
    assert [summary.documents for summary in built.summaries] == [96900, 3000, 100]
