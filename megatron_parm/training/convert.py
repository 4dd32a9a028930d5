"""From a folder in one format to a folder in another: what `tools/convert_checkpoint.py` does. Floor 7.

Every way goes through a `WholeModel`: whole tensors under our names, read one at a time. Between reading and writing
the names and shapes are compared with those of the model that the settings describe.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_parm import __version__
from megatron_parm.checkpoint.huggingface import (
    ORIGIN_CONFIG,
    check_names,
    read_huggingface,
    write_huggingface,
)
from megatron_parm.checkpoint.huggingface_folder import TOKENIZER_FILES, refuse_filled
from megatron_parm.checkpoint.megatron_write import write_megatron
from megatron_parm.checkpoint.whole_model import (
    TOKENIZER_FOLDER,
    SavedTensors,
    WholeModel,
    carried_files,
    read_saved,
    write_saved,
)
from megatron_parm.config.run import RunConfig, from_dict, resolve, to_dict
from megatron_parm.errors import CheckpointError, ConfigError, DataError
from megatron_parm.models.build import build_bert, build_gpt
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import saved_tensors, spec_of
from megatron_parm.tokenizers.build import padded_vocab_size
from megatron_parm.training.assemble import make_schedule, make_tokenizer, words_of_model
from megatron_parm.training.convert_megatron import MegatronOptions, read_megatron
from megatron_parm.training.progress_state import RunProgress

Format = Literal["hf", "megatron", "megatron_parm"]
OF_MEGATRON = MegatronOptions()
FORMATS: tuple[Format, ...] = ("hf", "megatron", "megatron_parm")
BERT_HEADS = ("lm_head.", "output_layer.", "pooler.", "binary_head.")
ORIGIN = "origin"  # of the JSON state: what a foreign format said that ours has no place for


@dataclass(frozen=True)
class Converted:
    """What was read and written. `lines` are to be told."""

    folder: Path
    lines: tuple[str, ...]


def expected_shapes(config: RunConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The tensors of the model that `config` describes, whole, without making their values."""
    ctx = ParallelContext.single(torch.device("meta"))
    build = build_gpt if config.bert is None else build_bert
    padded = padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by, 1)
    model = build(config, vocab_size, padded, ctx, torch.Generator(), draws_weights=False).model
    return {name: spec_of(tensor).global_shape for name, tensor in saved_tensors(model).items()}


def check_whole(model: WholeModel, where: Path) -> tuple[str, ...]:
    """Raise CheckpointError if the tensors are not those of the settings. A BERT may lack its heads; says so."""
    expected = expected_shapes(model.config, model.vocab_size)
    optional = BERT_HEADS if model.config.bert is not None else ()
    check_names(expected, model.tensors, str(where), optional)
    absent = sorted({name.split(".")[0] for name in expected if name not in model.tensors.entries})
    return (f"the model has no {', '.join(absent)}: training starts them afresh",) if absent else ()


def read_own(root: Path, ckpt_step: int | None = None) -> WholeModel:
    """The weights in a checkpoint of ours. Raises CheckpointError."""
    checkpoint, state = read_saved(root, ckpt_step)
    try:
        settings = state["config"]
        config, vocab_size = from_dict(settings), int(state["vocab_size"])
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{checkpoint.path}: its settings cannot be read: {error}") from None
    origin = state.get(ORIGIN)
    carried = carried_files(root, TOKENIZER_FILES)
    left_out = sum(not name.startswith("model.") for name in checkpoint.manifest.tensors)
    notes = (f"{left_out} tensors of the optimizer are left out",) if left_out else ()
    return WholeModel(
        resolve(_one_process(config), 1),
        vocab_size,
        SavedTensors(checkpoint),
        carried,
        origin if isinstance(origin, dict) else {},
        (*checkpoint.warnings, *notes),
    )


def _one_process(config: RunConfig) -> RunConfig:
    """Without the layout that the run had."""
    parallel = type(config.parallel)()
    training = replace(config.training, global_batch_size=0, rampup_batch_size=())
    moe = config.moe if config.moe is None else replace(config.moe, moe_schedule="baseline", moe_pipeline_chunks=None)
    return replace(config, parallel=parallel, training=training, moe=moe)


def write_own(root: Path, model: WholeModel, *, largest_file: int) -> tuple[str, ...]:
    """Save `model` as a checkpoint of ours without optimizer; returns lines to tell. Raises ConfigError."""
    config, vocab_size, notes = _with_tokenizer(model, root)
    state: dict[str, Any] = {
        "version": __version__,
        "config": to_dict(config),
        "progress": RunProgress().to_state(),
        "schedule": make_schedule(config).to_state(),
        "vocab_size": vocab_size,
        ORIGIN: dict(model.origin),
    }
    path = write_saved(root, model, state, largest_file=largest_file)
    return (*notes, f"start from {path} with --load {root} --finetune")


def _with_tokenizer(model: WholeModel, root: Path) -> tuple[RunConfig, int, tuple[str, ...]]:
    """The settings with the tokenizer whose files travel along, and its vocabulary."""
    if ORIGIN_CONFIG not in model.origin and not model.tokenizer_files:
        return model.config, model.vocab_size, ()
    notes: list[str] = []
    config, vocab_size = model.config, model.vocab_size
    by_name = {file.name: file for file in model.tokenizer_files}
    for found in _tokenizers(by_name, is_bert=config.bert is not None):
        data = replace(config.data, **found)
        try:
            tokenizer, words = make_tokenizer(replace(config, data=data))
        except (ConfigError, DataError) as error:
            notes.append(f"{found['tokenizer_type']} cannot read the tokenizer's files: {error}")
            continue
        words = words_of_model(tokenizer, words, vocab_size)
        if words > vocab_size:
            notes.append(f"{found['tokenizer_type']} has {words} tokens, the model {vocab_size}: not used")
            continue
        folder = (root / TOKENIZER_FOLDER).resolve()
        moved: dict[str, Any] = {
            name: str(folder / Path(value).name) if name != "tokenizer_type" else value for name, value in found.items()
        }
        if found["tokenizer_type"] == "HuggingFaceTokenizer":
            moved["tokenizer_model"] = str(folder)
        return replace(config, data=replace(config.data, **moved)), words, tuple(notes)
    if vocab_size > 1:  # the NullTokenizer adds one id of its own
        data = replace(config.data, tokenizer_type="NullTokenizer", vocab_size=vocab_size - 1)
        config = replace(config, data=data)
        notes.append(
            f"no tokenizer is known: --tokenizer-type NullTokenizer --vocab-size {vocab_size - 1} stands for it"
        )
    return config, vocab_size, tuple(notes)


def _tokenizers(files: Mapping[str, Path], *, is_bert: bool) -> list[dict[str, Any]]:
    """Settings of tokenizers that could read these files, the likeliest first."""
    found: list[dict[str, Any]] = []
    if is_bert and "vocab.txt" in files:
        kind = "BertWordPieceCase" if _is_cased(files) else "BertWordPieceLowerCase"
        found.append({"tokenizer_type": kind, "vocab_file": str(files["vocab.txt"])})
    if "tokenizer.json" in files and not is_bert:
        found.append({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(files["tokenizer.json"].parent)})
    if "vocab.json" in files and "merges.txt" in files:
        vocabulary, merges = str(files["vocab.json"]), str(files["merges.txt"])
        found.append({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": vocabulary, "merge_file": merges})
    if "tokenizer.model" in files:
        found.append({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(files["tokenizer.model"])})
    return found


def _is_cased(files: Mapping[str, Path]) -> bool:
    """Whether a BERT's words keep their capitals: by tokenizer_config.json, else by the pieces of vocab.txt."""
    try:
        values = json.loads(files["tokenizer_config.json"].read_bytes())
        return values["do_lower_case"] is False
    except (KeyError, TypeError, ValueError, OSError):
        pieces = files["vocab.txt"].read_text(encoding="utf-8", errors="replace").splitlines()
        return any(piece != piece.lower() for piece in pieces if not piece.startswith("["))


def convert(
    source: Format,
    load: Path,
    target: Format,
    save: Path,
    *,
    ckpt_step: int | None = None,
    largest_file: int,
    megatron: MegatronOptions = OF_MEGATRON,
) -> Converted:
    """Read `load`, check it against its settings, write `save`. Raises ConfigError and CheckpointError."""
    if target == "megatron_parm":
        if load.resolve() == save.resolve():
            raise ConfigError(f"--save {save} is the folder of --load; name a new folder")
    else:
        refuse_filled(save)
    if source == "megatron":
        model = read_megatron(load, ckpt_step, megatron)
    else:
        model = read_own(load, ckpt_step) if source == "megatron_parm" else read_huggingface(load)
    lines = (*model.notes, *check_whole(model, load))
    total = sum(info.bytes for info in model.tensors.entries.values())
    lines += (f"{len(model.tensors.entries)} tensors of {total / 1e6:.1f} MB",)
    if target == "hf":
        family = write_huggingface(save, model, largest_file=largest_file)
        lines += (f"written as {family}",)
    elif target == "megatron":
        lines += write_megatron(save, model, megatron.sizes)
    else:
        lines += write_own(save, model, largest_file=largest_file)
    return Converted(save, lines)
