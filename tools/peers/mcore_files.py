"""Megatron-Core's own files and logits, to judge conversions by (docs/convert.md). Started by torchrun.

`write`: a random model saved as legacy files by Megatron-Core's code, with its logits on fixed tokens.
`read`: the logits of a folder that `tools/convert_checkpoint.py --to megatron` wrote, loaded name by name.
"""

import argparse
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import cpu_device
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    cpu_device.patch_torch()
    DEVICES = cpu_device.patch_devices()

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

WORDS, LENGTH, LAYERS, HIDDEN, HEADS, WIDTH = 64, 16, 4, 32, 4, 48
LLAMA = {"swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm", "position_embedding_type": "rope",
         "group_query_attention": True, "num_query_groups": 2, "untie_embeddings_and_output_weights": True}  # fmt: skip
CASES = {
    "dense": {"bias_gelu_fusion": False},
    "llama": LLAMA,
    "moe": LLAMA | {"num_experts": 4, "moe_router_topk": 2},
    "moe with dense layers": LLAMA | {"num_experts": 4, "moe_router_topk": 2, "moe_layer_freq": [0, 1, 0, 1]},
}


def arguments_of(case: str, tp: int) -> argparse.Namespace:
    """The arguments that Megatron's training script would save for the case."""
    plain = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "ffn_hidden_size": WIDTH,
        "max_position_embeddings": LENGTH, "padded_vocab_size": WORDS, "make_vocab_size_divisible_by": 8,
        "tokenizer_type": "NullTokenizer", "vocab_size": WORDS - 1, "norm_epsilon": 1e-5, "normalization": "LayerNorm",
        "swiglu": False, "add_bias_linear": True, "position_embedding_type": "learned_absolute", "num_experts": None,
        "group_query_attention": False, "num_query_groups": 1, "untie_embeddings_and_output_weights": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.float32, "bias_gelu_fusion": True,
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1,
        "moe_layer_freq": 1,
    }  # fmt: skip
    return argparse.Namespace(**(plain | CASES[case]))


def build(args: argparse.Namespace) -> GPTModel:
    """Megatron-Core's model of these arguments, from its local layers."""
    has_experts = args.num_experts is not None
    pattern = args.moe_layer_freq
    settings = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=WIDTH,
        num_query_groups=args.num_query_groups if args.group_query_attention else HEADS,
        gated_linear_unit=args.swiglu, add_bias_linear=args.add_bias_linear, normalization=args.normalization,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        num_moe_experts=args.num_experts, moe_layer_freq=pattern, moe_token_dispatcher_type="alltoall",
        moe_router_topk=getattr(args, "moe_router_topk", 2), moe_router_load_balancing_type="none",
        use_cpu_initialization=not HAS_GPU, tensor_model_parallel_size=args.tensor_model_parallel_size,
        expert_tensor_parallel_size=args.tensor_model_parallel_size, sequence_parallel=False,
        gradient_accumulation_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.float32,
        pipeline_dtype=torch.float32, init_method_std=0.3,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=args.num_experts, moe_grouped_gemm=False, normalization=args.normalization
    )
    if has_experts and isinstance(pattern, list):
        spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=False)
    return GPTModel(
        settings, spec, vocab_size=WORDS, max_sequence_length=LENGTH, parallel_output=True,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )  # fmt: skip


@torch.no_grad()
def logits_of(model: GPTModel) -> torch.Tensor:
    """Whole logits [b, s, V] on tokens that everyone knows."""
    tokens = (torch.arange(2 * LENGTH) * 7 % WORDS).view(2, LENGTH)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    return gather_from_tensor_model_parallel_region(model.eval()(tokens, positions, mask))


def randomise(model: GPTModel) -> None:
    """Biases and norms too get values, the same on every rank that holds a copy."""
    generator = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and ("layernorm" in name or name.endswith(("linear_fc2.bias", "linear_proj.bias"))):
            weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
        elif weight.dim() == 1:
            weight.data += 0.2 * torch.randn(weight.shape)


def main() -> None:
    """Write or read, and keep the logits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["write", "read"])
    parser.add_argument("--case", required=True, choices=list(CASES))
    parser.add_argument("--folder", required=True, type=Path)
    flags = parser.parse_args()
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()
    if not HAS_GPU:
        cpu_device.patch_megatron()
        cpu_device.patch_uneven_collectives()
        cpu_device.patch_norm()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, expert_tensor_parallel_size=tp)
    torch.manual_seed(rank)
    model_parallel_cuda_manual_seed(1)
    args = arguments_of(flags.case, tp)
    model = build(args)
    if flags.action == "write":
        randomise(model)
        legacy = flags.folder / "legacy" / "iter_0000003" / f"mp_rank_{rank:02d}"
        legacy.mkdir(parents=True)
        state = {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": 3,
            "model": model.state_dict_for_save_checkpoint(),
        }
        torch.save(state, legacy / "model_optim_rng.pt")
        (flags.folder / "legacy" / "latest_checkpointed_iteration.txt").write_text("3")
    else:
        file = flags.folder / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        state = _load(file)
        missing = model.load_state_dict(state["model"], strict=False)
        lacking = [name for name in missing.missing_keys if not name.endswith("_extra_state")]
        if lacking or missing.unexpected_keys:
            raise SystemExit(f"missing {lacking}, unexpected {missing.unexpected_keys}")
    logits = logits_of(model)
    if rank == 0:
        torch.save(logits, flags.folder / "logits.pt")


def _load(file: Path) -> dict:
    torch.serialization.add_safe_globals([argparse.Namespace])
    return torch.load(file, weights_only=True)


if __name__ == "__main__":
    main()
