"""Rules of the corpus and its tokenizer. Floor 1.

As in `checks.py`: each raises ConfigError with the flags, the values, the rule, and a value that would work.
"""

from megatron_parm.config.data import DataConfig
from megatron_parm.config.fields import spelling_of
from megatron_parm.errors import ConfigError

_ONE_CORPUS = ("data_path", "data_args_path", "mock_data")  # cut by --split
_BY_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")


def check_data(data: DataConfig) -> None:
    """Check that corpus and tokenizer are named completely. The files themselves are not opened."""
    data.split_weights  # noqa: B018 - raises for a split that is not three weights
    _check_sources(data)
    _check_tokenizer(data)
    if data.sft and data.mock_data:
        raise ConfigError("--sft reads conversations, which --mock-data has not; use --data-path FILE.jsonl")


def _check_sources(data: DataConfig) -> None:
    whole = [spelling_of(name) for name in _ONE_CORPUS if getattr(data, name)]
    by_split = [spelling_of(name) for name in _BY_SPLIT if getattr(data, name)]
    by_file = ["--per-split-data-args-path"] if data.per_split_data_args_path else []
    given = whole + by_file + by_split
    if not given:
        raise ConfigError(
            "--data-path PREFIX is required: the corpus, a .bin and .idx pair made by tools/preprocess_data.py; or "
            "use --train-data-path and --valid-data-path, or --mock-data"
        )
    if len(whole) + len(by_file) + bool(by_split) > 1:
        raise ConfigError(
            f"{' and '.join(given)}: a run has one source of text; keep one of them (--train-data-path, "
            "--valid-data-path and --test-data-path belong together)"
        )
    if by_split and not data.train_data_path:
        raise ConfigError(f"{' and '.join(by_split)}: the text to train on is missing; add --train-data-path PREFIX")


def _check_tokenizer(data: DataConfig) -> None:
    needed = {
        "GPT2BPETokenizer": ("vocab_file", "merge_file"),
        "BertWordPieceLowerCase": ("vocab_file",),
        "BertWordPieceCase": ("vocab_file",),
        "NullTokenizer": ("vocab_size",),
    }.get(data.tokenizer_type, ("tokenizer_model",))
    missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(data, name) is None]
    if missing:
        raise ConfigError(
            f"--tokenizer-type {data.tokenizer_type} needs {' and '.join(missing)}; or use another --tokenizer-type, "
            "for instance NullTokenizer with --vocab-size"
        )
