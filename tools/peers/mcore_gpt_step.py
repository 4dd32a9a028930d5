"""Whole training steps of Megatron-Core's GPT with experts in every layer. Started by tools/bench_peers.py.

Forward, backward, its own reduction of gradients, clipping and Adam, on random tokens; sequence parallel where tp > 1.
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
    DEVICES = cpu_device.patch_devices()

import megatron.core
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig


def build(flags) -> GPTModel:
    """Rotary positions, LayerNorm, two products an expert, GELU, no biases, no dropout."""
    settings = TransformerConfig(
        num_layers=flags.layers,
        hidden_size=flags.hidden,
        num_attention_heads=flags.heads,
        ffn_hidden_size=flags.ffn,
        moe_ffn_hidden_size=flags.ffn,
        num_moe_experts=flags.num_experts,
        moe_router_topk=flags.topk,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
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
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        normalization="LayerNorm",
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    spec = get_gpt_layer_local_spec(num_experts=flags.num_experts, moe_grouped_gemm=False, normalization="LayerNorm")
    model = GPTModel(
        settings, spec, vocab_size=flags.vocab, max_sequence_length=flags.tokens, position_embedding_type="rope"
    )
    reduction = DistributedDataParallelConfig(use_distributed_optimizer=False, overlap_grad_reduce=False)
    return DistributedDataParallel(settings, reduction, model)


def main() -> None:
    """Time it and write the result."""
    parser = ranks.layer_flags(__doc__)
    for name, default in (("layers", 4), ("heads", 8), ("vocab", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pad", action="store_true", help="pad every expert's input to its capacity")
    flags = parser.parse_args()
    device = ranks.prepare()
    dist.init_process_group("nccl" if HAS_GPU else "gloo")
    if not HAS_GPU:
        cpu_device.patch_megatron()
        cpu_device.patch_uneven_collectives()
        cpu_device.patch_norm()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=flags.tp,
        expert_model_parallel_size=flags.ep,
        expert_tensor_parallel_size=flags.esp,
    )
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    model = build(flags).to(device)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, params_dtype=torch.float32, clip_grad=1.0), [model]
    )
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    text = torch.randint(0, flags.vocab, (1, flags.tokens + 1), generator=generator).to(device)
    positions = torch.arange(flags.tokens, device=device).unsqueeze(0)
    hidden = torch.triu(torch.ones(1, 1, flags.tokens, flags.tokens, dtype=torch.bool, device=device), 1)

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(text[:, :-1], positions, hidden, labels=text[:, 1:]).mean().backward()
        finalize_model_grads([model])
        optimizer.step()

    times = ranks.time_rounds(step, flags.warmup, flags.iters, device)
    ranks.finish(flags.json, "megatron-core", megatron.core.__version__, times)


if __name__ == "__main__":
    main()
