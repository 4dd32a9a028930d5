"""One MoE layer of Megatron-Core, forward and backward. Started by tools/bench_peers.py under the peer's own Python.

Its input is the rank's slice of the sequence (sequence parallelism), so it has no AllGather over tp at its ends.
"""

import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import cpu_device
import ranks
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    cpu_device.patch_torch()

import megatron.core
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig


def build(flags) -> MoELayer:
    """The layer, with two products an expert, GELU, no biases."""
    settings = TransformerConfig(
        num_layers=1,
        hidden_size=flags.hidden,
        num_attention_heads=8,
        ffn_hidden_size=flags.ffn,
        moe_ffn_hidden_size=flags.ffn,
        num_moe_experts=flags.num_experts,
        moe_router_topk=flags.topk,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        moe_grouped_gemm=False,
        moe_expert_capacity_factor=flags.capacity_factor if flags.capacity_factor > 0 else None,
        moe_pad_expert_input_to_capacity=flags.pad,
        add_bias_linear=False,
        use_cpu_initialization=not HAS_GPU,
        tensor_model_parallel_size=flags.tp,
        expert_model_parallel_size=flags.ep,
        expert_tensor_parallel_size=flags.esp,
        sequence_parallel=flags.tp > 1,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
    )
    spec = get_gpt_layer_local_spec(num_experts=flags.num_experts, moe_grouped_gemm=False)
    layer = MoELayer(settings, spec.submodules.mlp.submodules, layer_number=1)
    return layer.train()


def main() -> None:
    """Time it and write the result."""
    parser = ranks.layer_flags(__doc__)
    parser.add_argument("--pad", action="store_true", help="pad every expert's input to its capacity")
    flags = parser.parse_args()
    device = ranks.prepare()
    dist.init_process_group("nccl" if HAS_GPU else "gloo")
    if not HAS_GPU:
        cpu_device.patch_megatron()
        cpu_device.patch_uneven_collectives()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=flags.tp,
        expert_model_parallel_size=flags.ep,
        expert_tensor_parallel_size=flags.esp,
    )
    model_parallel_cuda_manual_seed(7)
    layer = build(flags).to(device)
    generator = torch.Generator().manual_seed(100 + parallel_state.get_data_parallel_rank())
    tokens = torch.randn(flags.tokens, 1, flags.hidden, generator=generator)
    own = tokens.chunk(flags.tp, 0)[parallel_state.get_tensor_model_parallel_rank()].to(device)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        output, _ = layer(own.clone().requires_grad_())
        output.float().pow(2).mean().backward()

    times = ranks.time_rounds(step, flags.warmup, flags.iters, device)
    ranks.finish(flags.json, "megatron-core", megatron.core.__version__, times)


if __name__ == "__main__":
    main()
