"""A run that starts from a folder of Hugging Face in place of a checkpoint of ours. Floor 7.

Weights only, at iteration 0. Each rank reads one whole tensor at a time and keeps its own box.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_parm.checkpoint.huggingface import read_huggingface
from megatron_parm.checkpoint.huggingface_folder import is_huggingface_folder
from megatron_parm.checkpoint.manifest import Manifest, TensorEntry
from megatron_parm.checkpoint.verify import VerifiedCheckpoint
from megatron_parm.checkpoint.whole_model import MODEL, WORD_ROWS, WholeModel
from megatron_parm.config.run import RunConfig, to_dict
from megatron_parm.errors import CheckpointError
from megatron_parm.parallel.agreement import on_all_ranks
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import ShardSpec
from megatron_parm.training.convert import check_whole
from megatron_parm.training.progress_state import RunProgress

NamedTensors = Mapping[str, tuple[Tensor, ShardSpec]]


def open_foreign(root: Path, ctx: ParallelContext) -> tuple[VerifiedCheckpoint, WholeModel] | None:
    """The model in `root` if it is a folder of Hugging Face. Call on all ranks. Raises CheckpointError on all."""

    def read() -> tuple[WholeModel, tuple[str, ...]] | None:
        if not is_huggingface_folder(root):
            return None
        model = read_huggingface(root)
        return model, check_whole(model, root)

    found = on_all_ranks(ctx.world, read)
    if found is None:
        return None
    model, notes = found
    tensors = {
        MODEL + name: TensorEntry(info.shape, str(info.dtype).removeprefix("torch."), ())
        for name, info in model.tensors.entries.items()
    }
    manifest = Manifest(0, "", {}, {}, tensors, {}, {})
    return VerifiedCheckpoint(root, manifest, (*model.notes, *notes)), model


def settings_to_compare(model: WholeModel, config: RunConfig) -> dict[str, Any]:
    """The settings of `model`, with those of `config` where they change no weight of it."""
    mine, found = to_dict(config), to_dict(model.config)
    free = ["tokenizer_type"]
    if config.model.rotates:
        free.append("max_position_embeddings")
    if all(model.config.moe_layers):
        free.append("ffn_hidden_size")
    if model.config.moe_layers == config.moe_layers:
        free.append("moe_layer_freq")
    return found | {name: mine[name] for name in free if name in mine}


def foreign_state(model: WholeModel, config: RunConfig) -> dict[str, Any]:
    """The JSON state that a checkpoint of ours would have."""
    return {
        "config": settings_to_compare(model, config),
        "progress": RunProgress().to_state(),
        "vocab_size": model.vocab_size,
    }


def fill_from_foreign(model: WholeModel, tensors: NamedTensors, vocab_size: int, ctx: ParallelContext) -> None:
    """Copy this rank's boxes out of the whole tensors, in the type of the run. Call on all ranks.

    `tensors` by their checkpoint names. Rows of padding become zero; what the folder lacks keeps its initial values.
    Raises CheckpointError on all ranks if the vocabulary of the run is larger than the folder's.
    """
    rows = model.tensors.entries[WORD_ROWS[0]].shape[0]

    @torch.no_grad()
    def fill() -> None:
        if vocab_size > rows:
            raise CheckpointError(
                f"the tokenizer has {vocab_size} tokens, the word embedding of --load {rows} rows; use the tokenizer "
                "of that model"
            )
        for name, (local, spec) in tensors.items():
            own = name.removeprefix(MODEL)
            if own not in model.tensors.entries:
                continue
            whole = model.tensors.read(own)
            if own in WORD_ROWS:
                kept = whole[spec.box[0]]
                local.zero_()
                local[: len(kept)] = kept
            else:
                local.copy_(whole[spec.box])

    on_all_ranks(ctx.world, fill)
