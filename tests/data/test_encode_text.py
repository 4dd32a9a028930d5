"""Text to ids in several processes. Reference: the tokenizer called on each document in turn."""

import json
import os
import signal

import numpy as np
import pytest

from megatron_parm.data.encode_text import EncodeRules, encode_chunk, encode_chunks
from megatron_parm.data.text_chunks import find_chunks
from megatron_parm.errors import DataError
from megatron_parm.tokenizers.null import NullTokenizer

RULES = EncodeRules(("text",), np.dtype("u2"), 100)


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text, "n": str(number)}) + "\n" for number, text in enumerate(texts)))
    return path


def documents(encoded, column=0):
    ids, lengths = encoded.columns[column].ids, encoded.columns[column].lengths
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if len(lengths) else []


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_documents_keep_their_order(tmp_path, num_workers) -> None:
    texts = [" ".join(str((number + place) % 100) for place in range(number % 7)) for number in range(200)]
    path = write(tmp_path / "x.jsonl", texts)
    encoded = list(encode_chunks(find_chunks(path, True, 64), NullTokenizer(100), RULES, num_workers))
    expected = [[*NullTokenizer(100).encode(text), 100] for text in texts if text]
    assert [document for chunk in encoded for document in documents(chunk)] == expected
    assert sum(chunk.num_documents for chunk in encoded) == 200
    assert sum(chunk.columns[0].num_empty for chunk in encoded) == texts.count("")
    assert len(encoded) > 3 * num_workers
    assert encoded[0].columns[0].ids.dtype == np.uint16


def test_keys_are_columns_and_a_broken_line_is_left_out_of_all(tmp_path) -> None:
    path = write(tmp_path / "x.jsonl", ["1", "x", "3"])
    (chunk,) = find_chunks(path, True, 1000)
    encoded = encode_chunk(chunk, NullTokenizer(100), EncodeRules(("text", "n"), np.dtype("u2"), None))
    assert (documents(encoded, 0), documents(encoded, 1)) == ([[1], [3]], [[0], [2]])
    assert [(place.line, "'x' is not a token id" in place.reason) for place in encoded.broken] == [(2, True)]
    assert encoded.num_documents == 2


def test_a_chunk_without_a_document(tmp_path) -> None:
    (tmp_path / "x.jsonl").write_text("{\n[\n")
    (chunk,) = find_chunks(tmp_path / "x.jsonl", True, 1000)
    encoded = encode_chunk(chunk, NullTokenizer(100), RULES)
    assert (encoded.num_documents, len(encoded.columns[0].ids), len(encoded.broken)) == (0, 0, 2)


class Deadly(NullTokenizer):
    def encode_batch(self, texts):
        os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_batch(texts)


def test_a_dead_worker_is_an_error_and_no_hang(tmp_path) -> None:
    path = write(tmp_path / "x.jsonl", ["1 2 3"] * 50)
    with pytest.raises(DataError, match="a worker process ended"):
        list(encode_chunks(find_chunks(path, True, 64), Deadly(100), RULES, 2))
