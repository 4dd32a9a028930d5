"""A model of ours as a legacy checkpoint of Megatron-Core. Floor 6. Source: formats C.7.

`release/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` with core names (`--transformer-impl local`), version 3, weights and
arguments only. One rank's share is in memory at a time.
"""

import argparse
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_parm.checkpoint import paths
from megatron_parm.checkpoint.huggingface_folder import refuse_filled
from megatron_parm.checkpoint.megatron_config import arguments_of
from megatron_parm.checkpoint.megatron_names import EMBEDDING, EXPERT, LAYER, TOKEN_TYPES, cut_of, names_of
from megatron_parm.checkpoint.megatron_parts import cut_out
from megatron_parm.checkpoint.tensor_files import TensorInfo, TensorSource
from megatron_parm.checkpoint.weight_rules import Heads, TheirsFromOurs
from megatron_parm.checkpoint.whole_model import WORD_ROWS, WholeModel, WithRows
from megatron_parm.config.run import RunConfig
from megatron_parm.errors import ConfigError
from megatron_parm.tokenizers.build import padded_vocab_size

PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class TargetSizes:
    """Over how many ranks the files are cut."""

    tp: int = 1
    pp: int = 1
    ep: int = 1


def check_sizes(config: RunConfig, sizes: TargetSizes) -> None:
    """Raise ConfigError if the model cannot be cut that way."""
    model, moe = config.model, config.moe
    parts = [
        ("--target-tensor-parallel-size", sizes.tp, model.query_groups, "groups of key and value heads"),
        ("--target-tensor-parallel-size", sizes.tp, model.feed_forward_size, "the width of the feed-forward"),
        ("--target-pipeline-parallel-size", sizes.pp, model.num_layers, "layers"),
    ]
    if moe is not None:
        parts.append(("--target-expert-parallel-size", sizes.ep, moe.num_experts, "experts"))
        parts.append(("--target-tensor-parallel-size", sizes.tp, config.expert_size, "the width of an expert"))
        if moe.moe_shared_expert_intermediate_size is not None:
            width = moe.moe_shared_expert_intermediate_size
            parts.append(("--target-tensor-parallel-size", sizes.tp, width, "the width of the shared expert"))
    elif sizes.ep > 1:
        raise ConfigError(f"--target-expert-parallel-size {sizes.ep}: the model has no experts; use 1")
    for flag, size, whole, what in parts:
        if size < 1 or whole % size:
            raise ConfigError(f"{flag} {size} must divide {what}, {whole}")


class _WithoutSegments:
    """A BERT without a second segment: Megatron's has no embedding of segments then."""

    def __init__(self, tensors: TensorSource) -> None:
        self._tensors = tensors
        if tensors.read(TOKEN_TYPES).any():
            raise ConfigError(
                f"a BERT of one segment adds {TOKEN_TYPES} to every word, for which Megatron's model has no place; "
                "convert it to hf instead"
            )
        self._entries = {name: info for name, info in tensors.entries.items() if name != TOKEN_TYPES}

    @property
    def entries(self) -> Mapping[str, TensorInfo]:
        """All but the segments."""
        return self._entries

    def read(self, name: str) -> Tensor:
        """One of them."""
        return self._tensors.read(name)


def write_megatron(root: Path, model: WholeModel, sizes: TargetSizes) -> tuple[str, ...]:
    """Write `model` as the checkpoint `release` of `root`; returns lines to tell. Raises ConfigError."""
    refuse_filled(root)
    config = model.config
    check_sizes(config, sizes)
    rows = padded_vocab_size(model.vocab_size, config.model.make_vocab_size_divisible_by, sizes.tp)
    arguments = arguments_of(config, model.vocab_size, rows, _named(sizes))
    ours: TensorSource = WithRows(model.tensors, rows)
    arguments["params_dtype"] = dtype = ours.entries[EMBEDDING].dtype
    arguments |= {name: name == PRECISIONS.get(dtype) for name in PRECISIONS.values()}
    if config.bert is not None and config.bert.bert_no_binary_head:
        ours = _WithoutSegments(ours)
    is_gated = config.model.activation == "swiglu"
    rules = names_of(is_bert=config.bert is not None, is_gated=is_gated)
    links = list(rules.links(config.moe_layers, 0 if config.moe is None else config.moe.num_experts))
    heads = Heads(config.model.num_attention_heads, config.model.query_groups)
    theirs = TheirsFromOurs(ours, links, heads, str(root))
    root.parent.mkdir(parents=True, exist_ok=True)
    temporary = root.with_name(f"{root.name}.tmp-{uuid.uuid4().hex[:16]}")
    try:
        for rank in _ranks(sizes):
            _write_rank(temporary / paths.RELEASE, rank, sizes, theirs, config, arguments)
        paths.write_durably(temporary / paths.TRACKER, paths.RELEASE.encode())
        for file in model.tokenizer_files:
            shutil.copyfile(file, temporary / file.name)
        paths.sync_folder(temporary)
        temporary.rename(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return (
        f"weights only, cut over tp {sizes.tp}, pp {sizes.pp}, ep {sizes.ep}; read it in Megatron with --ckpt-format "
        "torch --transformer-impl local --finetune",
    )


def _named(sizes: TargetSizes) -> dict[str, int]:
    return {
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.tp,
        "context_parallel_size": 1,
        "world_size": sizes.tp * sizes.pp * sizes.ep,
    }


def _ranks(sizes: TargetSizes) -> Iterator[TargetSizes]:
    """Every rank, as its numbers."""
    for pp in range(sizes.pp):
        for tp in range(sizes.tp):
            for ep in range(sizes.ep):
                yield TargetSizes(tp, pp, ep)


def _write_rank(
    folder: Path,
    rank: TargetSizes,
    sizes: TargetSizes,
    theirs: TensorSource,
    config: RunConfig,
    arguments: Mapping[str, Any],
) -> None:
    name = f"mp_rank_{rank.tp:02d}" + (f"_{rank.pp:03d}" if sizes.pp > 1 else "")
    name += f"_{rank.ep:03d}" if sizes.ep > 1 else ""
    (folder / name).mkdir(parents=True)
    is_gated = config.model.activation == "swiglu"
    model = {
        local: cut_out(theirs.read(whole), cut_of(whole, is_gated=is_gated), rank.tp, sizes.tp).clone()
        for whole, local in _held(theirs, rank, sizes, config)
    }
    state = {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "model": model,
    }
    torch.save(state, folder / name / "model_optim_rng.pt")


def _held(theirs: TensorSource, rank: TargetSizes, sizes: TargetSizes, config: RunConfig) -> Iterator[tuple[str, str]]:
    """The tensors of a rank: core names over the whole model, and with its own numbers."""
    a_stage = config.model.num_layers // sizes.pp
    num_local = 0 if config.moe is None else config.moe.num_experts // sizes.ep
    for whole in theirs.entries:
        local, layer, expert = whole, LAYER.fullmatch(whole), EXPERT.fullmatch(whole)
        if layer:
            stage = int(layer[2]) // a_stage
            local = f"{layer[1]}.layers.{int(layer[2]) % a_stage}.{layer[3]}"
        else:
            stage = 0 if whole.startswith("embedding.") else sizes.pp - 1
        if expert:
            if int(expert[2]) // num_local != rank.ep:
                continue
            stem = local[: -len(f"{expert[2]}.{expert[3]}")]
            local = f"{stem}{int(expert[2]) % num_local}.{expert[3]}"
        if stage == rank.pp:
            yield whole, local
    is_last_of_several = sizes.pp > 1 and rank.pp == sizes.pp - 1
    if is_last_of_several and not config.model.untie_embeddings_and_output_weights:
        yield WORD_ROWS[0], "output_layer.weight"
