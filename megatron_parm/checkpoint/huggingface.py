"""Models of Hugging Face's local folders as ours, and ours as theirs. Floor 6.

Names and rows: `huggingface_names.py`. Settings: `huggingface_config.py`, `huggingface_export.py`. What is read and
what is left over is checked, so a weight is never dropped without a word (FC-16).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_parm.checkpoint.huggingface_config import READERS, Config, ReadConfig, read_config, settings_of
from megatron_parm.checkpoint.huggingface_export import config_values, family_of
from megatron_parm.checkpoint.huggingface_folder import (
    CONFIG,
    FolderTensors,
    plain_file,
    tokenizer_files,
    write_folder,
)
from megatron_parm.checkpoint.huggingface_names import NAMES, NamesOfFamily
from megatron_parm.checkpoint.huggingface_tokenizer import files_of_tokenizer
from megatron_parm.checkpoint.tensor_files import TensorInfo, TensorSource, names
from megatron_parm.checkpoint.weight_rules import Heads, OursFromTheirs, TheirsFromOurs
from megatron_parm.checkpoint.whole_model import WORD_ROWS, WholeModel, WithRows
from megatron_parm.config import checks, checks_router
from megatron_parm.config.fields import check_fields
from megatron_parm.config.run import RunConfig, from_dict, resolve
from megatron_parm.errors import CheckpointError, ConfigError

HEADS = ("cls.", "lm_head.")  # names that never have the prefix of the model's body
ORIGIN_CONFIG, ORIGIN_IS_BARE = "huggingface_config", "huggingface_is_bare"
PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class _Renamed:
    """Tensors under other names."""

    def __init__(self, tensors: TensorSource, old_names: Mapping[str, str]) -> None:
        self._tensors, self._old_names = tensors, old_names
        self._entries = {name: tensors.entries[old] for name, old in old_names.items()}

    @property
    def entries(self) -> Mapping[str, TensorInfo]:
        """By the new names."""
        return self._entries

    def read(self, name: str) -> Tensor:
        """One, by its new name."""
        return self._tensors.read(self._old_names[name])


def run_config(settings: Mapping[str, Any], precision: torch.dtype) -> RunConfig:
    """A run's settings around those of a model, for one process. Raises ConfigError for a model that cannot be."""
    needed = {
        "seq_length": settings["max_position_embeddings"],
        "micro_batch_size": 1,
        "lr": 1e-4,
        "train_iters": 1,
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 1,
        "precision": PRECISIONS.get(precision, "fp32"),
    }
    config = from_dict(needed | dict(settings))
    if config.bert is not None:  # which has no made-up documents
        config = replace(config, data=replace(config.data, mock_data=False))
    for section in (config.model, config.moe, config.bert):
        if section is not None:
            check_fields(section)
    checks.check_model(config.model, 1, config.data.seq_length, has_dense_layer=not all(config.moe_layers))
    if config.moe is not None:
        checks.check_experts(config.moe, config.model, 1)
        checks_router.check_router(config.moe)
    return resolve(config, 1)


def read_huggingface(folder: Path) -> WholeModel:
    """The model in a folder, its tensors read when they are asked for. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist or is not a folder")
    config = read_config(plain_file(folder, CONFIG))
    theirs = FolderTensors(folder)
    family = _family(config, theirs)
    found = settings_of(config, family)
    table = NAMES[family]
    tensors, is_bare = _with_prefix(theirs, table)
    tensors = _without_repetitions(tensors, table, folder, is_tied=_is_tied(found))
    run = _run_of(found, tensors, table, config)
    moe = run.moe
    num_experts = 0 if moe is None else moe.num_experts
    if run.model.num_layers + sum(run.moe_layers) * num_experts > len(tensors.entries):
        raise CheckpointError(
            f"{config.path} speaks of {run.model.num_layers} layers with {num_experts} experts; the folder has "
            f"{len(tensors.entries)} tensors, fewer than they need"
        )
    heads = Heads(run.model.num_attention_heads, run.model.query_groups)
    ours = OursFromTheirs(tensors, list(table.links(run.moe_layers, num_experts)), heads, f"the model of {config.path}")
    origin = {ORIGIN_CONFIG: dict(config.values), ORIGIN_IS_BARE: is_bare}
    return WholeModel(run, found.vocab_size, ours, tokenizer_files(folder), origin, found.notes)


def _family(config: Config, theirs: TensorSource) -> str:
    family = config.get("model_type")
    if family is None:  # configs of 2019 lack it
        marks = {"bert": "bert.embeddings.", "gpt2": "h.0."}
        found = [one for one, mark in marks.items() if any(mark in name for name in theirs.entries)]
        family = found[0] if found else None
    if not isinstance(family, str) or family not in READERS:
        raise config.refusal("model_type", f"known are {', '.join(READERS)}")
    return family


def _is_tied(found: ReadConfig) -> bool:
    return not found.settings.get("untie_embeddings_and_output_weights", False)


def _run_of(found: ReadConfig, tensors: TensorSource, table: NamesOfFamily, config: Config) -> RunConfig:
    word_rows = table.outside["embedding.word_embeddings.weight"].theirs[0]
    if word_rows not in tensors.entries:
        raise CheckpointError(f"{config.path.parent} has no tensor {word_rows}")
    rows = tensors.entries[word_rows]
    if rows.shape[:1] != (found.vocab_size,):
        raise CheckpointError(f"{config.path}: vocab_size is {found.vocab_size}, but {word_rows} is {rows}")
    try:
        return run_config(found.settings, rows.dtype)
    except ConfigError as error:
        raise CheckpointError(f"{config.path} describes a model that cannot be: {error}") from None


def _with_prefix(theirs: TensorSource, table: NamesOfFamily) -> tuple[TensorSource, bool]:
    """Names as in a model with heads, and whether those of the folder lacked the prefix; constants are left out."""
    is_bare = not any(name.startswith(table.prefix) for name in theirs.entries)
    prefix = table.prefix if is_bare else ""
    new_names = {name if name.startswith(HEADS) else prefix + name: name for name in theirs.entries}
    return _Renamed(theirs, {new: old for new, old in new_names.items() if not table.is_constant(new)}), is_bare


def _without_repetitions(tensors: TensorSource, table: NamesOfFamily, where: Path, *, is_tied: bool) -> TensorSource:
    """Without the second names of tensors. Raises CheckpointError if one is not what the first name holds."""
    second = {
        name: first
        for name, first in table.repeated.items()
        if name in tensors.entries and (is_tied or name != "lm_head.weight")
    }
    for name, first in second.items():
        if first not in tensors.entries or not torch.equal(tensors.read(name), tensors.read(first)):
            raise CheckpointError(
                f"{where}: {name} and {first} should be one tensor (tied embeddings), but they differ; with weights of "
                "its own the config must say tie_word_embeddings false"
            )
    return _Renamed(tensors, {name: name for name in tensors.entries if name not in second})


def write_huggingface(folder: Path, model: WholeModel, *, largest_file: int) -> str:
    """Write `model` as a folder of the family that computes the same; returns the family. Raises ConfigError."""
    config = model.config
    family = family_of(config)
    table = NAMES[family]
    origin = _fitting_origin(model, family)
    rows = model.vocab_size if origin is None else origin["vocab_size"]
    ours = WithRows(model.tensors, rows)
    num_experts = 0 if config.moe is None else config.moe.num_experts
    heads = Heads(config.model.num_attention_heads, config.model.query_groups)
    links = list(table.links(config.moe_layers, num_experts))
    theirs: TensorSource = TheirsFromOurs(ours, links, heads, str(folder))
    has_heads = any(name.startswith(HEADS) for name in theirs.entries)
    is_bare = (
        bool(model.origin.get(ORIGIN_IS_BARE)) if origin is not None else config.bert is not None and not has_heads
    )
    if is_bare:
        theirs = _Renamed(theirs, {name.removeprefix(table.prefix): name for name in theirs.entries})
    if origin is None:
        dtype = str(ours.entries[WORD_ROWS[0]].dtype).removeprefix("torch.")
        origin = config_values(config, family, rows, dtype, _architecture(family, theirs.entries))
    carried: Mapping[str, Path | bytes] = {file.name: file for file in model.tokenizer_files}
    carried = carried or files_of_tokenizer(config.data, config.model.max_position_embeddings)
    write_folder(folder, origin, theirs, carried, largest_file=largest_file)
    return family


def _fitting_origin(model: WholeModel, family: str) -> dict[str, Any] | None:
    """The config.json that the model once had, if it still says what the settings say."""
    values = model.origin.get(ORIGIN_CONFIG)
    if not isinstance(values, dict):
        return None
    try:
        found = settings_of(Config(Path(CONFIG), values), family)
        was = run_config(found.settings, torch.float32)
    except (CheckpointError, ConfigError):
        return None
    now = model.config

    def weights_of(config: RunConfig) -> tuple[object, ...]:
        dense = replace(config.model, hidden_dropout=0.0, attention_dropout=0.0)
        return dense, config.moe_layers, config.moe and config.moe.num_experts, config.expert_size

    rows = model.tensors.entries[WORD_ROWS[0]].shape[0]
    return dict(values) if weights_of(was) == weights_of(now) and rows >= found.vocab_size else None


def _architecture(family: str, entries: Mapping[str, TensorInfo]) -> str:
    if family not in ("bert", "megatron-bert"):
        return ""
    stem = "Bert" if family == "bert" else "MegatronBert"
    if not any(name.startswith("cls.predictions") for name in entries):
        return f"{stem}Model"
    return f"{stem}ForPreTraining" if "cls.seq_relationship.weight" in entries else f"{stem}ForMaskedLM"


def check_names(
    expected: Mapping[str, tuple[int, ...]], found: TensorSource, where: str, optional: Sequence[str]
) -> None:
    """Raise CheckpointError if `found` are not exactly the tensors of our model; word rows may be more or fewer.

    Those whose names begin with one of `optional` may be missing.
    """
    missing = [name for name in expected if name not in found.entries and not name.startswith(tuple(optional))]
    more = found.entries.keys() - expected.keys()
    if missing or more:
        told = [f"missing: {names(missing)}"] if missing else []
        told += [f"not in our model: {names(more)}"] if more else []
        raise CheckpointError(f"{where} does not hold the tensors that its settings speak of; {'; '.join(told)}")
    for name, shape in expected.items():
        info = found.entries.get(name)
        skipped = 1 if name in WORD_ROWS else 0
        if info is not None and info.shape[skipped:] != shape[skipped:]:
            raise CheckpointError(f"{where}: {name} is {info}, by the settings it should be {list(shape)}")
