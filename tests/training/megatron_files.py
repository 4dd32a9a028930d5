"""A small writer of Megatron's classic files (formats C.7), apart from the code under test.

It knows queries, keys and values as tensors of their own, and writes their rows in the order of each version.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAYERS, HIDDEN, HEADS, WIDTH, WORDS, LENGTH = 4, 16, 4, 24, 32, 12
HEAD = HIDDEN // HEADS
TOKENIZER = {"tokenizer_type": "NullTokenizer", "vocab_size": WORDS - 1}
ARGUMENTS = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "ffn_hidden_size": WIDTH,
    "max_position_embeddings": LENGTH, "padded_vocab_size": WORDS, "make_vocab_size_divisible_by": 8,
    "layernorm_epsilon": 1e-5, "openai_gelu": False, "bias_gelu_fusion": False, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "params_dtype": torch.float32, "consumed_train_samples": 0, **TOKENIZER,
}  # fmt: skip


def weights(*, is_bert: bool = False, experts: int = 0) -> dict[str, Tensor]:
    """Whole random weights by names of this file; `q`, `k`, `v` are [heads, head, ...] each."""
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    found = {"word": draw(WORDS, HIDDEN), "position": draw(LENGTH, HIDDEN)}
    for layer in range(LAYERS):
        for part in "qkv":
            found[f"{layer}.{part}.weight"] = draw(HEADS, HEAD, HIDDEN)
            found[f"{layer}.{part}.bias"] = draw(HEADS, HEAD)
        for name, rows, columns in (("dense", HIDDEN, HIDDEN), ("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
            several = (experts,) if experts and name != "dense" else ()
            found[f"{layer}.{name}.weight"] = draw(*several, rows, columns)
            found[f"{layer}.{name}.bias"] = draw(*several, rows)
        if experts:
            found[f"{layer}.router"] = draw(experts, HIDDEN)
        for name in ("first", "second"):
            found |= {f"{layer}.{name}.weight": draw(HIDDEN), f"{layer}.{name}.bias": draw(HIDDEN)}
    found |= {"last.weight": draw(HIDDEN), "last.bias": draw(HIDDEN)}
    if is_bert:
        found |= {"types": draw(2, HIDDEN), "words.bias": draw(WORDS), "order.weight": draw(2, HIDDEN)}
        found |= {"order.bias": draw(2)}
        for name in ("pool", "lm"):
            found |= {f"{name}.weight": draw(HIDDEN, HIDDEN), f"{name}.bias": draw(HIDDEN)}
        found |= {"lm_norm.weight": draw(HIDDEN), "lm_norm.bias": draw(HIDDEN)}
    return found


def fused(whole: dict[str, Tensor], layer: int, end: str, version: float, heads: slice) -> Tensor:
    """Rows of queries, keys and values of some heads as a file of that version has them."""
    parts = torch.stack([whole[f"{layer}.{part}.{end}"][heads] for part in "qkv"])  # [3, heads, head, ...]
    if version == 0:
        ordered = parts
    elif version == 1:
        ordered = parts.movedim(0, 2)  # [heads, head, 3, ...]
    else:
        ordered = parts.transpose(0, 1)  # [heads, 3, head, ...]
    return ordered.reshape(-1, *parts.shape[3:]).clone()


def _rank(
    whole: dict[str, Tensor], tp: int, num_tp: int, layers: range, version: float, old: bool, experts: int
) -> dict[str, Tensor]:
    attention = "attention" if old else "self_attention"
    found: dict[str, Tensor] = {}
    for number, layer in enumerate(layers):
        heads = slice(tp * HEADS // num_tp, (tp + 1) * HEADS // num_tp)
        for end in ("weight", "bias"):
            to = f"layers.{number}."
            found[f"{to}{attention}.query_key_value.{end}"] = fused(whole, layer, end, version, heads)
            found[f"{to}input_layernorm.{end}"] = whole[f"{layer}.first.{end}"]
            found[f"{to}post_attention_layernorm.{end}"] = whole[f"{layer}.second.{end}"]
        columns = whole[f"{layer}.dense.weight"].chunk(num_tp, 1)[tp]
        found |= {f"{to}{attention}.dense.weight": columns, f"{to}{attention}.dense.bias": whole[f"{layer}.dense.bias"]}
        if experts:
            found[f"{to}mlp.router.weight"] = whole[f"{layer}.router"]
            found[f"{to}mlp.router.bias"] = torch.zeros(experts)
        for expert in range(max(1, experts)):
            mlp = f"{to}mlp.experts.{expert}." if experts else f"{to}mlp."
            at = expert if experts else slice(None)
            found[f"{mlp}dense_h_to_4h.weight"] = whole[f"{layer}.up.weight"][at].chunk(num_tp, 0)[tp]
            found[f"{mlp}dense_h_to_4h.bias"] = whole[f"{layer}.up.bias"][at].chunk(num_tp, 0)[tp]
            found[f"{mlp}dense_4h_to_h.weight"] = whole[f"{layer}.down.weight"][at].chunk(num_tp, 1)[tp]
            found[f"{mlp}dense_4h_to_h.bias"] = whole[f"{layer}.down.bias"][at]
    return found


def write_classic(
    root: Path,
    whole: dict[str, Tensor],
    *,
    version: float = 3.0,
    old: bool = False,
    tp: int = 1,
    pp: int = 1,
    is_bert: bool = False,
    experts: int = 0,
    **more: Any,
) -> Path:
    """Write `whole` as iteration 7 of Megatron 2.0 (`old`) or 2.5; returns the folder of the iteration."""
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    arguments = ARGUMENTS | ({"model_parallel_size": tp} if old and pp == 1 else sizes)
    arguments |= ({"num_experts": experts} if experts else {}) | more
    body = "transformer" if old else "encoder"
    for stage in range(pp):
        for rank in range(tp):
            layers = range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp)
            inner: dict[str, Any] = _rank(whole, rank, tp, layers, version, old, experts)
            model: dict[str, Any] = {"language_model": {}}
            words = {"weight": whole["word"].chunk(tp)[rank]}
            if stage == 0:
                embedding = {"word_embeddings": words, "position_embeddings": {"weight": whole["position"]}}
                embedding |= {"tokentype_embeddings": {"weight": whole["types"]}} if is_bert else {}
                model["language_model"]["embedding"] = embedding
            if stage == pp - 1:
                inner |= {f"final_layernorm.{end}": whole[f"last.{end}"] for end in ("weight", "bias")}
                if pp > 1:
                    model["word_embeddings_for_head"] = words
                if is_bert:
                    model["language_model"]["pooler"] = _module(whole, "pool", "dense.")
                    head = _module(whole, "lm", "dense.") | _module(whole, "lm_norm", "layernorm.")
                    model["lm_head"] = head | {"bias": whole["words.bias"].chunk(tp)[rank]}
                    model["binary_head"] = _module(whole, "order", "")
            model["language_model"][body] = inner
            folder = root / "iter_0000007" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            folder.mkdir(parents=True)
            state = {"args": argparse.Namespace(**arguments), "iteration": 7, "model": model, "optimizer": {"step": 7}}
            if version:
                state["checkpoint_version"] = version
            torch.save(state, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return root / "iter_0000007"


def _module(whole: dict[str, Tensor], name: str, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{end}": whole[f"{name}.{end}"] for end in ("weight", "bias")}
