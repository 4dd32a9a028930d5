"""Hugging Face's names and layouts of weights beside ours. Floor 6.

A table says for each of our tensors how it is made of theirs. What is read and what is left over is checked, so a
weight is never dropped without a word.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_parm.errors import CheckpointError
from megatron_parm.parallel.sharding import spec_of

Make = Callable[[Sequence[Tensor], int], Tensor]  # their tensors, number of query groups -> ours


@dataclass(frozen=True)
class Source:
    """Their tensors that make one of ours, and how. `{layer}` stands for a layer's number."""

    names: tuple[str, ...]
    make: Make


def _same(tensors: Sequence[Tensor], _groups: int) -> Tensor:
    return tensors[0]


def _fused(tensors: Sequence[Tensor], groups: int) -> Tensor:
    """Rows of q, k and v in our order: for each group its query heads, then its key, then its value."""
    return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in tensors], dim=1).flatten(0, 1)


def _with_ends(ours: str, *theirs: str, make: Make = _same) -> dict[str, Source]:
    """Weight and bias of one module."""
    return {f"{ours}.{end}": Source(tuple(f"{name}.{end}" for name in theirs), make) for end in ("weight", "bias")}


_THEIR_LAYER = "bert.encoder.layer.{layer}"
_ATTENTION = f"{_THEIR_LAYER}.attention"
BERT_LAYER: dict[str, Source] = (
    _with_ends("self_attention.linear_qkv", *(f"{_ATTENTION}.self.{x}" for x in ("query", "key", "value")), make=_fused)
    | _with_ends("self_attention.linear_proj", f"{_ATTENTION}.output.dense")
    | _with_ends("post_attention_layernorm", f"{_ATTENTION}.output.LayerNorm")
    | _with_ends("mlp.linear_fc1", f"{_THEIR_LAYER}.intermediate.dense")
    | _with_ends("mlp.linear_fc2", f"{_THEIR_LAYER}.output.dense")
    | _with_ends("post_mlp_layernorm", f"{_THEIR_LAYER}.output.LayerNorm")
)
BERT: dict[str, Source] = (
    {
        f"embedding.{kind}_embeddings.weight": Source((f"bert.embeddings.{name}.weight",), _same)
        for kind, name in (
            ("word", "word_embeddings"),
            ("position", "position_embeddings"),
            ("tokentype", "token_type_embeddings"),
        )
    }
    | _with_ends("embedding.layernorm", "bert.embeddings.LayerNorm")
    | _with_ends("lm_head.dense", "cls.predictions.transform.dense")
    | _with_ends("lm_head.layer_norm", "cls.predictions.transform.LayerNorm")
    | {"output_layer.bias": Source(("cls.predictions.bias",), _same)}
    | _with_ends("pooler.dense", "bert.pooler.dense")
    | _with_ends("binary_head", "cls.seq_relationship")
)
# the same tensor under a second name, or a constant
BERT_REPEATED = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "bert.embeddings.position_ids")


def bert_from_huggingface(theirs: Mapping[str, Tensor], num_layers: int, num_heads: int) -> dict[str, Tensor]:
    """Whole tensors of a BERT under our names, of all that `theirs` (BertForPreTraining, or its parts) holds.

    A bare encoder's names may lack the prefix `bert.`. Raises CheckpointError for tensors that have no place, and for
    a part of a fused one that is missing.
    """
    prefix = "" if any(name.startswith("bert.") for name in theirs) else "bert."
    known = {name if name.startswith("cls.") else prefix + name: tensor for name, tensor in theirs.items()}
    table = BERT | {
        f"encoder.layers.{layer}.{ours}": Source(tuple(name.format(layer=layer) for name in source.names), source.make)
        for layer in range(num_layers)
        for ours, source in BERT_LAYER.items()
    }
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for ours, source in table.items():
        present = [name for name in source.names if name in known]
        if not present:
            continue
        if len(present) < len(source.names):
            raise CheckpointError(f"{ours} is made of {', '.join(source.names)}; only {', '.join(present)} is there")
        found[ours] = source.make([known[name] for name in present], num_heads)
        used.update(present)
    left = sorted(known.keys() - used - set(BERT_REPEATED))
    if left:
        raise CheckpointError(f"{len(left)} tensors have no place in a BERT of {num_layers} layers: {', '.join(left)}")
    return found


def fill(model: nn.Module, whole: Mapping[str, Tensor], *, except_for: Sequence[str] = ()) -> None:
    """Copy this rank's box of every whole tensor into the parameter of that name.

    Rows that only our padded vocabulary has become zero. Every parameter of the model must be given, save those whose
    names begin with one of `except_for`. Raises CheckpointError naming what is missing, or of another shape.
    """
    parameters = dict(model.named_parameters())
    missing = [name for name in parameters if name not in whole and not name.startswith(tuple(except_for))]
    if missing:
        raise CheckpointError(f"no tensor is given for {', '.join(missing)}")
    for name, parameter in parameters.items():
        if name not in whole:
            continue
        spec, given = spec_of(parameter), whole[name]
        may_pad = name in ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
        has_rows = given.shape[:1] <= spec.global_shape[:1] if may_pad else given.shape[:1] == spec.global_shape[:1]
        if given.shape[1:] != spec.global_shape[1:] or not has_rows:
            raise CheckpointError(f"{name} is {list(spec.global_shape)} here, {list(given.shape)} there")
        with torch.no_grad():
            padded = given.new_zeros(spec.global_shape)
            padded[: given.shape[0]] = given
            parameter.copy_(padded[spec.box])
