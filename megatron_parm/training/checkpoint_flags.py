"""--use-checkpoint-args: flags that are not given are taken from the checkpoint. Floor 7.

Read before the ranks are joined, so by each rank for itself; that all read the same is seen when they compare their
settings, and every file is verified later, when the checkpoint is opened. No path is ever taken from a checkpoint.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_parm.checkpoint.find import peek_state
from megatron_parm.checkpoint.huggingface import read_huggingface
from megatron_parm.checkpoint.huggingface_folder import is_huggingface_folder
from megatron_parm.config.run import to_dict
from megatron_parm.errors import CheckpointError
from megatron_parm.training.same_model import FIXED_SETTINGS

MODEL_FLAGS = (
    *FIXED_SETTINGS,
    "attention_dropout",
    "hidden_dropout",
    "seq_length",
    "vocab_size",
    "vocab_extra_ids",
)
FOREIGN_FLAGS = tuple(name for name in FIXED_SETTINGS if name not in ("tokenizer_type", "make_vocab_size_divisible_by"))
LAYOUT_FLAGS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
)


def settings_of_checkpoint(given: Mapping[str, object]) -> dict[str, Any]:
    """By field, what the checkpoint of the flags `given` says of the model; nothing in a first start.

    Raises CheckpointError if there is a checkpoint and it cannot be read.
    """
    names = MODEL_FLAGS + (LAYOUT_FLAGS if given.get("use_mp_args_from_checkpoint_args") else ())
    for flag in ("load", "pretrained_checkpoint"):
        folder, step = given.get(flag), given.get("ckpt_step") if flag == "load" else None
        if not isinstance(folder, str):
            continue
        assert step is None or isinstance(step, int)
        if is_huggingface_folder(Path(folder)):
            settings = to_dict(read_huggingface(Path(folder)).config)
            return {name: settings[name] for name in FOREIGN_FLAGS if settings.get(name) is not None}
        state = peek_state(Path(folder), ckpt_step=step, falls_back=given.get("resume") == "auto")
        if state is None:
            continue
        config = state.get("config")
        if not isinstance(config, dict):
            raise CheckpointError(f"the checkpoint in {folder} holds no flags; leave --use-checkpoint-args out")
        return {name: config[name] for name in names if config.get(name) is not None}
    return {}
