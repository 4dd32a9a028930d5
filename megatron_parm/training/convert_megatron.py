"""Megatron's end of a conversion: whose files are taken, and which tokenizer the model's words belong to. Floor 7."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_parm.checkpoint.megatron import ORIGIN_ARGUMENTS, read_legacy
from megatron_parm.checkpoint.megatron_dist import read_dist
from megatron_parm.checkpoint.megatron_folder import METADATA, iteration_folder, require_trust
from megatron_parm.checkpoint.megatron_write import TargetSizes
from megatron_parm.checkpoint.whole_model import WORD_ROWS, WholeModel
from megatron_parm.errors import CheckpointError, ConfigError
from megatron_parm.tokenizers.build import TOKENIZER_TYPES
from megatron_parm.training.assemble import make_tokenizer


@dataclass(frozen=True)
class MegatronOptions:
    """What only Megatron's format needs. `tokenizer`: files of the tokenizer by our settings' names."""

    is_trusted: bool = False
    sizes: TargetSizes = field(default_factory=TargetSizes)
    tokenizer: Mapping[str, str] = field(default_factory=dict)


def read_megatron(root: Path, ckpt_step: int | None, options: MegatronOptions) -> WholeModel:
    """The model in a folder of Megatron, legacy or torch_dist. Raises CheckpointError, ConfigError for a tokenizer."""
    require_trust(root, is_trusted=options.is_trusted)
    folder = iteration_folder(root, ckpt_step)
    model = read_dist(folder) if (folder / METADATA).exists() else read_legacy(folder)
    return _with_words(model, options.tokenizer, folder)


def _with_words(model: WholeModel, files: Mapping[str, str], folder: Path) -> WholeModel:
    """The model with its tokenizer and number of words, which Megatron's files mostly lack."""
    said: Mapping[str, Any] = model.origin[ORIGIN_ARGUMENTS]
    kind, rows = said.get("tokenizer_type"), model.tensors.entries[WORD_ROWS[0]].shape[0]
    extra = said.get("vocab_extra_ids", 0)
    if files:
        if kind not in TOKENIZER_TYPES:
            raise ConfigError(
                f"{folder} was written with the tokenizer {kind!r}, which ours has not; leave its files out"
            )
        changes: dict[str, Any] = {"tokenizer_type": kind, "vocab_size": None, "vocab_extra_ids": extra, **files}
        data = replace(model.config.data, **changes)
        config = replace(model.config, data=data)
        _, words = make_tokenizer(config)
        if words > rows:
            raise CheckpointError(f"{kind} has {words} tokens, the word embeddings of {folder} {rows} rows")
        return replace(model, config=config, vocab_size=words)
    words = model.vocab_size
    if kind == "NullTokenizer" and words == model.origin.get("vocab_size"):
        data = replace(model.config.data, tokenizer_type=kind, vocab_size=words - 1)
        return replace(model, config=replace(model.config, data=data))
    data = replace(model.config.data, tokenizer_type="NullTokenizer", vocab_size=max(1, words - 1))
    told = ", ".join(f"{name} {value}" for name, value in said.items()) or "none"
    note = (
        f"the tokenizer there: {told}. Its files were not read; --tokenizer-type NullTokenizer --vocab-size "
        f"{words - 1} stands for it. Give --vocab-file, --merge-file or --tokenizer-model to keep it"
    )
    return replace(model, config=replace(model.config, data=data), notes=(*model.notes, note))
