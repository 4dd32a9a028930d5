"""Rules that tie the settings of a BERT, or of a classifier of texts, together. Floor 1."""

from megatron_parm.config.classify import ClassifyConfig
from megatron_parm.config.data import DataConfig
from megatron_parm.config.model import ModelConfig
from megatron_parm.errors import ConfigError

SHORTEST_SAMPLE = 5  # [CLS] a [SEP] b [SEP]
WORD_PIECES = ("BertWordPieceLowerCase", "BertWordPieceCase")


def check_bert(model: ModelConfig, data: DataConfig) -> None:
    """Check what a BERT asks of the model and the data. Raises ConfigError."""
    if model.untie_embeddings_and_output_weights:
        raise ConfigError(
            "--untie-embeddings-and-output-weights: the word head of a BERT uses the word embedding; leave it out"
        )
    if data.seq_length < SHORTEST_SAMPLE:
        raise ConfigError(
            f"--seq-length {data.seq_length} is too short for a BERT: a sample is [CLS] A [SEP] B [SEP]; use "
            f"{SHORTEST_SAMPLE} or more"
        )
    if data.mock_data:
        raise ConfigError(
            "--mock-data makes documents without sentences, which a BERT needs; give --data-path PREFIX, a corpus of "
            "tools/preprocess_data.py --split-sentences"
        )
    if data.tokenizer_type not in WORD_PIECES:
        raise ConfigError(
            f"--tokenizer-type {data.tokenizer_type} has no [CLS], [SEP], [MASK] and word pieces, which a BERT needs; "
            f"use {' or '.join(WORD_PIECES)} with --vocab-file"
        )
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if getattr(data, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is for documents joined to one stream of a GPT; a sample of a BERT is of "
                "one document: leave it out"
            )


def check_classify(classify: ClassifyConfig, data: DataConfig) -> None:
    """Check what a classifier asks of its classes and files. Raises ConfigError."""
    names = classify.class_names
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(
            f"--class-names {' '.join(names) or '(none)'}: name two or more classes, each once, as the files write them"
        )
    if data.data_args_path is not None or data.per_split_data_args_path is not None or data.sft:
        raise ConfigError(
            "a classifier reads its files by --data-path, or --train-data-path with --valid-data-path; leave out "
            "--sft, --data-args-path and --per-split-data-args-path"
        )
