"""Files of conversations to datasets. Reference: the lines that were written."""

import gzip
import json

import numpy as np
import pytest

from megatron_parm.data.build import GPTDataRules
from megatron_parm.data.gpt_dataset import DocumentRules
from megatron_parm.data.sft_build import build_sft_datasets
from megatron_parm.errors import ConfigError, DataError
from megatron_parm.tokenizers.null import NullTokenizer

RULES = GPTDataRules(sequence_length=8, seed=3, vocab_size=100, documents=DocumentRules())


def write(path, count, first=0):
    lines = [json.dumps({"prompt": f"{first + n} 1", "completion": f"{first + n}"}) for n in range(count)]
    content = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def build(paths=(), by_split=((), (), ()), requests=(6, 2, 2), split="80,10,10"):
    return build_sft_datasets(paths, by_split, requests, RULES, split, NullTokenizer(99), "identity")


def numbers_of(dataset):
    return {int(token) for sample in dataset for token in sample["tokens"] if token not in (1, 99)}


def test_splits_are_parts_of_the_conversations(tmp_path) -> None:
    path = write(tmp_path / "x.jsonl", 40, first=2)
    built = build([path], requests=(20, 2, 0))
    assert numbers_of(built.train) == set(range(2, 34)) and numbers_of(built.valid) == set(range(34, 38))
    assert built.test is None and (len(built.train), len(built.valid)) == (20, 2)
    assert str(built.summaries[0]) == (
        f"train: {path}: 32 conversations (0 cut to 8 tokens), 96 tokens, 64 of them answers; 16 samples an epoch, "
        "75 % full; 20 samples asked for"
    )


def test_several_files_and_a_file_for_each_split(tmp_path) -> None:
    first, second = write(tmp_path / "x.jsonl", 4, first=2), write(tmp_path / "y.jsonl.gz", 4, first=50)
    both = build([first, second], requests=(4, 0, 0), split="1,0,0")
    assert numbers_of(both.train) == {2, 3, 4, 5, 50, 51, 52, 53}
    apart = build(by_split=([first], [second], []))
    assert numbers_of(apart.train) == {2, 3, 4, 5} and numbers_of(apart.valid) == {50, 51, 52, 53}
    assert apart.test is None


def test_a_changed_file_is_read_anew(tmp_path) -> None:
    path = write(tmp_path / "x.jsonl", 4, first=2)
    assert numbers_of(build([path], requests=(4, 0, 0), split="1").train) == {2, 3, 4, 5}
    write(tmp_path / "x.jsonl", 4, first=60)
    assert numbers_of(build([path], requests=(4, 0, 0), split="1").train) == {60, 61, 62, 63}
    assert any((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "broken JSON"),
        ('{"text": "1"}', "neither a chat"),
        ('{"prompt": "1", "completion": "x"}', "'x' is not a token id"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, reason) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "1", "completion": "2"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=rf"x.jsonl line 3: .*{reason}"):
        build([str(path)], requests=(1, 0, 0), split="1")
    path.write_bytes(b"\xff\n")
    with pytest.raises(DataError, match=r"x.jsonl line 1: not UTF-8"):
        build([str(path)], requests=(1, 0, 0), split="1")


def test_files_that_cannot_serve(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"--data-path /no/such: with --sft it must be a file of JSON lines"):
        build(["/no/such"])
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no conversation was found"):
        build([str(tmp_path / "x.jsonl")])
    path = write(tmp_path / "y.jsonl", 3)
    with pytest.raises(ConfigError, match="valid"):
        build([path], split="100,0,0")


def test_labels_are_never_of_another_conversation(tmp_path) -> None:
    path = write(tmp_path / "x.jsonl", 30, first=2)
    for sample in build([path], requests=(15, 0, 0), split="1").train:
        starts = np.flatnonzero(sample["position_ids"] == 0)
        for start, stop in zip(starts, [*starts[1:], 8], strict=True):
            if sample["loss_mask"][start:stop].any():
                number = sample["tokens"][start]
                assert sample["tokens"][start:stop].tolist() == [number, 1, number]
                assert sample["labels"][start:stop].tolist() == [1, number, 99]
