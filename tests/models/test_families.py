"""Models as users know them by name, built from their flags, against Hugging Face's with the same random weights.

Every case runs whole on one process and cut over tp 2; the weights come by way of the folder that transformers saves.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from megatron_parm.checkpoint.huggingface import read_huggingface
from megatron_parm.config.run import check_run, resolve
from megatron_parm.models.build import build_gpt
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import spec_of
from tests.config.commands import config_of
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.models.test_gpt import LOGITS_TOLERANCE, randomise

WORDS, LENGTH, LAYERS = 14, 24, 2
SIZES = (
    f"--num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length {LENGTH} "
    f"--max-position-embeddings {LENGTH} --attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 1"
)
MODERN = "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights"
ROPE = f"{MODERN} --position-embedding-type rope --group-query-attention --num-query-groups 2 --norm-epsilon 1e-6"
EXPERTS = "--num-experts 4 --moe-router-topk 2"
COMMON = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-6,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "tie_word_embeddings": False,
    "attn_implementation": "eager",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """`flags` of ours; `name` and `settings` of Hugging Face's."""

    flags: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 6}
FAMILIES = {
    "GPT-3": Family("--openai-gelu", "GPT2"),
    "Llama": Family(ROPE, "Llama"),
    "Llama 3.1": Family(
        f"{ROPE} --rotary-base 500 --use-rope-scaling --rope-scaling-factor 4 "
        "--rope-original-max-position-embeddings 12",
        "Llama",
        {"rope_parameters": LLAMA3},
    ),
    "Llama, linear": Family(
        f"{ROPE} --rotary-seq-len-interpolation-factor 4",
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "YaRN": Family(
        f"{ROPE} --position-embedding-type yarn --rotary-base 500 --yarn-rotary-scaling-factor 4 "
        "--yarn-original-max-position-embeddings 6",
        "Llama",
        {"rope_parameters": YARN},
    ),
    "Mistral, window": Family(f"{ROPE} --window-size 3,0", "Mistral", {"sliding_window": 4}),
    "Qwen2": Family(f"{ROPE} --add-qkv-bias", "Qwen2"),
    "Mixtral": Family(
        f"{ROPE} --rotary-base 1000000 {EXPERTS}", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "Qwen2-MoE": Family(
        f"{ROPE} --add-qkv-bias {EXPERTS} --moe-ffn-hidden-size 24 --moe-router-pre-softmax "
        "--moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate",
        "Qwen2Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 40, "norm_topk_prob": False},
    ),
    "Qwen3-MoE": Family(
        f"{ROPE} --kv-channels 16 --qk-layernorm {EXPERTS} --moe-ffn-hidden-size 24",
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16,
         "norm_topk_prob": True},
    ),
    "OLMoE": Family(
        f"{ROPE} --qk-layernorm --qk-layernorm-over all_heads {EXPERTS} --moe-router-pre-softmax",
        "Olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
    ),
}  # fmt: skip


def hugging_face(family: Family) -> nn.Module:
    """The judge, with random weights."""
    settings: dict[str, Any] = {**COMMON, **family.settings}
    if family.name == "GPT2":
        settings = {
            "vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_inner": 48,
            "bos_token_id": 0, "eos_token_id": 0,
        }  # fmt: skip
    config = getattr(transformers, f"{family.name}Config")(**settings)
    head = "LMHeadModel" if family.name == "GPT2" else "ForCausalLM"
    return randomise(getattr(transformers, family.name + head)(config))


def weights_of(hf: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The judge's weights under our names, whole, by way of the folder that it saves."""
    hf.save_pretrained(folder)  # type: ignore[operator]
    tensors = read_huggingface(folder).tensors
    return {name: tensors.read(name) for name in tensors.entries}


def tokens_of_rows() -> Tensor:
    return torch.randint(0, WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def logits_of(ctx: ParallelContext, flags: str, weights: dict[str, Tensor]) -> Tensor:
    """[b, s, V] of our model with these whole weights, on the layout of `ctx`."""
    sizes = (
        f"--tensor-model-parallel-size {ctx.tp.size} --expert-model-parallel-size {ctx.ep.size} "
        f"--expert-tensor-parallel-size {ctx.esp.size} --moe-schedule s1"
        if "--num-experts" in flags
        else f"--tensor-model-parallel-size {ctx.tp.size}"
    )
    config = config_of(f"{SIZES} {flags} {sizes} --micro-batch-size 3")
    check_run(config, ctx.world.size)
    config = resolve(config, ctx.world.size)
    model = build_gpt(config, WORDS, WORDS, ctx, torch.Generator()).model.eval()
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys(), own.keys() ^ weights.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            assert spec_of(parameter).global_shape == weights[name].shape, name
            parameter.copy_(weights[name][spec_of(parameter).box])
        logits = model(tokens_of_rows(), torch.arange(LENGTH).expand(3, LENGTH))  # [s, b, V/tp]
    return torch.cat(list(transport.gather_stack(logits, ctx.tp)), dim=-1).transpose(0, 1)


def compare(pools: Pools, layout: Layout, name: str, folder: Path, change: Callable[[str], str] = str) -> float:
    """The largest difference of any logit."""
    family = FAMILIES[name]
    hf = hugging_face(family)
    with torch.no_grad():
        expected = hf(input_ids=tokens_of_rows()).logits
    assert expected.abs().max() > 0.5, "logits of order 1"
    found = pools.run(layout, logits_of, change(family.flags), weights_of(hf, folder))
    return max((logits - expected).abs().max().item() for logits in found)


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, tp=2), Layout(2, tp=2, ep=2)], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_hugging_face(pools: Pools, tmp_path: Path, name: str, layout: Layout) -> None:
    if layout.ep > 1 and "--num-experts" not in FAMILIES[name].flags:
        pytest.skip("a dense model has no experts to spread")
    assert compare(pools, layout, name, tmp_path) < LOGITS_TOLERANCE


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("Llama 3.1", "--use-rope-scaling"),
        ("Llama, linear", "--rotary-seq-len-interpolation-factor 4"),
        ("YaRN", "--yarn-rotary-scaling-factor 4"),
        ("Mistral, window", "--window-size 3,0"),
        ("Qwen2-MoE", "--moe-router-pre-softmax"),
    ],
)
def test_without_the_flag_the_logits_differ(pools: Pools, tmp_path: Path, name: str, flag: str) -> None:
    """Negative control: each option matters at these sizes."""
    assert compare(pools, Layout(1), name, tmp_path, lambda flags: flags.replace(flag, "")) > 10 * LOGITS_TOLERANCE
