"""Legacy checkpoints of Megatron read as whole models. Floor 6. Source: formats C.7; files: `megatron_folder.py`.

The files are pickles. They are read as data (`pickle_values.py`), so nothing in them runs; the optimizer's state and
the random states are left where they are.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_parm.checkpoint.huggingface import run_config
from megatron_parm.checkpoint.megatron_config import SavedArguments, words_of
from megatron_parm.checkpoint.megatron_folder import RankFile, rank_files
from megatron_parm.checkpoint.megatron_names import (
    BERT_MARKS,
    COPY_OF_EMBEDDING,
    EMBEDDING,
    EXPERT,
    LAYER,
    TOKEN_TYPES,
    core_name,
    cut_of,
    flattened,
    names_of,
)
from megatron_parm.checkpoint.megatron_parts import Joined, JoinedTensors, Slice, grouped_slices, ordered_rows
from megatron_parm.checkpoint.pickle_values import Instance
from megatron_parm.checkpoint.tensor_files import TensorInfo, TensorSource
from megatron_parm.checkpoint.torch_files import StoredTensor
from megatron_parm.checkpoint.weight_rules import Heads, OursFromTheirs
from megatron_parm.checkpoint.whole_model import WholeModel
from megatron_parm.errors import CheckpointError, ConfigError

ORIGIN_ARGUMENTS = "megatron_arguments"


def read_legacy(folder: Path) -> WholeModel:
    """The model in the folder of one iteration. Raises CheckpointError."""
    files = rank_files(folder)
    first = files[0]
    arguments = SavedArguments.of(first.state.get("args"), str(first.path))
    version = first.state.get("checkpoint_version", 0)
    if isinstance(version, bool) or not isinstance(version, int | float) or version not in (0, 1, 2, 3):
        raise CheckpointError(f"{first.path}: checkpoint_version is {str(version)[:50]}; known are 0 to 3")
    hidden, heads = arguments.count("hidden_size"), arguments.count("num_attention_heads")
    head_dim = arguments.count("kv_channels", default=hidden // max(1, heads))
    named = _core_slices(files, arguments, float(version), head_dim)
    return whole_model(folder, JoinedTensors(_joined(named, arguments, files)), arguments, ())


def whole_model(where: Path, tensors: TensorSource, arguments: SavedArguments, notes: tuple[str, ...]) -> WholeModel:
    """A model of whole tensors by core names, with its settings. Raises CheckpointError."""
    names = tensors.entries
    is_bert = any(name.startswith(BERT_MARKS) for name in names)
    if EMBEDDING not in names:
        raise CheckpointError(f"{where} has no word embeddings: the files of its first stage are missing")
    rows = names[EMBEDDING].shape[0]
    layers = arguments.count("num_layers", "encoder_num_layers")
    if not 1 <= layers <= len(names):
        raise CheckpointError(f"{arguments.path} speaks of {layers} layers, there are {len(names)} tensors")
    body = "encoder" if is_bert else "decoder"
    moe_layers = [f"{body}.layers.{layer}.mlp.router.weight" in names for layer in range(layers)]
    settings = arguments.settings(moe_layers, is_bert=is_bert, has_binary_head="binary_head.weight" in names)
    try:
        config = run_config(settings, names[EMBEDDING].dtype)
    except ConfigError as error:
        raise CheckpointError(f"{arguments.path} describes a model that cannot be: {error}") from None
    moe = config.moe
    if moe is not None and moe.num_experts > len(names):
        raise CheckpointError(f"{arguments.path} speaks of {moe.num_experts} experts, there are {len(names)} tensors")
    prepared, more = _fitted(tensors, is_bert=is_bert, ties=not config.model.untie_embeddings_and_output_weights)
    rules = names_of(is_bert=is_bert, is_gated=config.model.activation == "swiglu")
    links = list(rules.links(config.moe_layers, 0 if moe is None else moe.num_experts))
    heads = Heads(config.model.num_attention_heads, config.model.query_groups)
    ours = OursFromTheirs(prepared, links, heads, f"the model of {arguments.path}")
    words = words_of(arguments, rows)
    origin = {ORIGIN_ARGUMENTS: _told(arguments)} | ({} if words is None else {"vocab_size": words})
    return WholeModel(config, words or rows, ours, (), origin, (*notes, *more))


def _told(arguments: SavedArguments) -> dict[str, Any]:
    """The tokenizer of the arguments, as text: which files a run will need."""
    names = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "vocab_extra_ids")
    return {name: value for name in names if isinstance(value := arguments.values.get(name), str | int) and value != ""}


class _Fitted:
    """Without second copies of tensors and biases that are zero, and with segments where a BERT has none."""

    def __init__(self, tensors: TensorSource, dropped: set[str], segments: TensorInfo | None) -> None:
        self._tensors = tensors
        self._entries = {name: info for name, info in tensors.entries.items() if name not in dropped}
        if segments is not None:
            self._entries[TOKEN_TYPES] = segments
        self._has_segments = segments is None

    @property
    def entries(self) -> Mapping[str, TensorInfo]:
        """Those that are left."""
        return self._entries

    def read(self, name: str) -> torch.Tensor:
        """One of them."""
        if name == TOKEN_TYPES and not self._has_segments:
            info = self._entries[name]
            return torch.zeros(info.shape, dtype=info.dtype)
        return self._tensors.read(name)


def _fitted(tensors: TensorSource, *, is_bert: bool, ties: bool) -> tuple[TensorSource, tuple[str, ...]]:
    dropped: set[str] = set()
    copies = [COPY_OF_EMBEDDING, *(["output_layer.weight"] if ties else [])]
    for name in copies:
        if name in tensors.entries:
            if not torch.equal(tensors.read(name), tensors.read(EMBEDDING)):
                raise CheckpointError(
                    f"{name} of the last stage and {EMBEDDING} of the first must be one tensor (tied), but they differ"
                )
            dropped.add(name)
    for name in tensors.entries:
        if name.endswith(".mlp.router.bias"):
            if tensors.read(name).any():
                raise CheckpointError(f"{name} is not zero: our router has no bias, so it would choose other experts")
            dropped.add(name)
    notes: tuple[str, ...] = (f"{len(dropped)} tensors that repeat others or are zero are left out",) if dropped else ()
    segments = None
    if is_bert and TOKEN_TYPES not in tensors.entries:
        info = tensors.entries[EMBEDDING]
        segments = TensorInfo((1, info.shape[1]), info.dtype)
        notes += ("the model has no segments: ours has one, of zeros",)
    return _Fitted(tensors, dropped, segments), notes


Named = dict[str, dict[tuple[int, int], Slice]]  # by core name: (tp, ep) -> slice


def _core_slices(files: Sequence[RankFile], arguments: SavedArguments, version: float, head_dim: int) -> Named:
    """Every slice by its core name, layers and experts numbered over the whole model."""
    states = {file.path: _chunks(file) for file in files}
    is_bert = any(
        name.removeprefix("module.").startswith(("lm_head", "binary_head", "language_model.pooler", "pooler"))
        for chunks in states.values() for chunk in chunks for name in chunk
    )  # fmt: skip
    body = "encoder" if is_bert else "decoder"
    num_local = arguments.num_experts // (max(file.ep for file in files) + 1)
    held: dict[tuple[int, Path], dict[str, Slice]] = {}
    for file in files:
        for number, chunk in enumerate(states[file.path]):
            held[number, file.path] = _slices(file, chunk, body, version, head_dim, num_local, arguments)
    offsets = _layer_offsets(files, held)
    named: Named = {}
    for (number, path), slices in held.items():
        file = next(file for file in files if file.path == path)
        for name, one in slices.items():
            layer, expert = LAYER.fullmatch(name), EXPERT.fullmatch(name)
            whole = name
            if layer:
                whole = f"{layer[1]}.layers.{int(layer[2]) + offsets[number, file.pp]}.{layer[3]}"
            if expert:
                stem = whole[: -len(f"{expert[2]}.{expert[3]}")]
                whole = f"{stem}{int(expert[2]) + file.ep * num_local}.{expert[3]}"
            places = named.setdefault(whole, {})
            if (file.tp, file.ep) in places:
                raise CheckpointError(f"{path} holds {whole}, which {places[file.tp, file.ep].where} holds too")
            places[file.tp, file.ep] = one
    return named


def _chunks(file: RankFile) -> list[dict[str, Any]]:
    """The flat state of each of the rank's virtual stages."""
    if "model" in file.state:
        return [flattened(file.state["model"], str(file.path))]
    numbered = [file.state[f"model{number}"] for number in range(len(file.state)) if f"model{number}" in file.state]
    if not numbered:
        raise CheckpointError(f"{file.path} holds no model")
    return [flattened(chunk, str(file.path)) for chunk in numbered]


def _slices(
    file: RankFile,
    chunk: Mapping[str, Any],
    body: str,
    version: float,
    head_dim: int,
    num_local: int,
    arguments: SavedArguments,
) -> dict[str, Slice]:
    """What a virtual stage of a rank holds, by core names with its own numbers. Raises CheckpointError."""
    found: dict[str, Slice] = {}
    for old, value in chunk.items():
        name = core_name(old, body)
        if name is None or value is None or (isinstance(value, Instance) and value.kind == "_io.BytesIO"):
            continue
        if not isinstance(value, StoredTensor):
            raise CheckpointError(f"{file.path}: {old} in its model is no tensor")
        one = Slice(value.info, value.read, str(file.path))
        try:
            if ".self_attention.linear_qkv." in name and version < 2:
                one = one.changed(partial(ordered_rows, version=version, head_dim=head_dim))
            if name.endswith((".mlp.experts.weight1", ".mlp.experts.weight2")):
                new = grouped_slices(name, one, num_local, arguments.count("hidden_size"))
            else:
                new = {name: one}
        except (RuntimeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{file.path}: {old} {one.info} does not fit its arguments ({error})") from None
        if new.keys() & found.keys():
            raise CheckpointError(f"{file.path}: two of its tensors are {min(new.keys() & found.keys())}")
        found |= new
    return found


def _layer_offsets(
    files: Sequence[RankFile], held: Mapping[tuple[int, Path], Mapping[str, Slice]]
) -> dict[tuple[int, int], int]:
    """The first layer of each virtual stage of each stage: all stages of the first, then those of the second."""
    counts: dict[tuple[int, int], int] = {}
    for (number, path), slices in held.items():
        file = next(file for file in files if file.path == path)
        layers = [int(match[2]) for name in slices if (match := LAYER.fullmatch(name))]
        if layers and sorted(set(layers)) != list(range(max(layers) + 1)):
            raise CheckpointError(f"{path}: its layers are {sorted(set(layers))}; they should be numbered from 0")
        counts.setdefault((number, file.pp), len(set(layers)))
    offsets, reached = {}, 0
    for place in sorted(counts):
        offsets[place] = reached
        reached += counts[place]
    return offsets


def _joined(named: Named, arguments: SavedArguments, files: Sequence[RankFile]) -> dict[str, Joined]:
    """For each whole tensor its slices in order, and how they are cut."""
    tp = max(file.tp for file in files) + 1
    esp = arguments.count("expert_tensor_parallel_size", default=tp)
    if arguments.num_experts and esp not in (1, tp):
        raise CheckpointError(
            f"{arguments.path}: experts are cut over {esp} ranks, dense layers over {tp}: which file holds which part "
            f"is not known; only expert_tensor_parallel_size 1 or {tp} is read"
        )
    is_gated = arguments.is_set("swiglu")
    found: dict[str, Joined] = {}
    for name, places in named.items():
        cut = cut_of(name, is_gated=is_gated)
        if name == COPY_OF_EMBEDDING:
            cut = "rows"
        if EXPERT.fullmatch(name) and esp == 1:
            cut = "whole"
        order = sorted(places) if cut == "whole" else _one_a_rank(name, places, tp)
        found[name] = Joined([places[place] for place in order], cut)
    return found


def _one_a_rank(name: str, places: Mapping[tuple[int, int], Slice], tp: int) -> list[tuple[int, int]]:
    """One slice of each rank of tp; ranks of ep hold the same dense slices."""
    order = []
    for rank in range(tp):
        mine = sorted(place for place in places if place[0] == rank)
        if not mine:
            raise CheckpointError(f"{name}: no file has the slice of tensor-parallel rank {rank}")
        order.append(mine[0])
    return order
