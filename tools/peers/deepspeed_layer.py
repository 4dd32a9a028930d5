"""One MoE layer of DeepSpeed, forward and backward. Started by tools/bench_peers.py under the peer's own Python.

esp must be 1 or tp: DeepSpeed cuts an expert over the tensor-parallel ranks or not at all.
"""

import os
import sys
from pathlib import Path

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).parent))

import deepspeed
import ranks
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import Tensor, nn

MIN_CAPACITY = 4


class Places:
    """What DeepSpeed asks of a model-parallel unit: consecutive ranks share a layer."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, dist.get_rank()
        world = dist.get_world_size()
        self.sharing = self._own([range(first, first + size) for first in range(0, world, size)])
        self.copies = self._own([range(place, world, size) for place in range(size)])

    def _own(self, tables: list[range]) -> dist.ProcessGroup:
        made = [(dist.new_group(list(table)), table) for table in tables]
        return next(group for group, table in made if self.rank in table)

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_rank(self) -> int:
        return self.rank % self.size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.sharing

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self.size

    def get_data_parallel_rank(self) -> int:
        return self.rank // self.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.copies

    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_group = get_model_parallel_group


class Enter(torch.autograd.Function):
    """Identity, whose gradient is summed over the ranks that share the expert."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Leave(torch.autograd.Function):
    """Sum over the ranks that share the expert, whose gradient is the identity."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


class Group:
    """A process group that survives the deep copies that DeepSpeed makes of an expert."""

    def __init__(self, group: "dist.ProcessGroup | None") -> None:
        self.group = group

    def __deepcopy__(self, _memo: object) -> "Group":
        return self


class Expert(nn.Module):
    """Two products and GELU without biases; cut over `parts` ranks."""

    def __init__(self, hidden: int, ffn: int, parts: int, group: "dist.ProcessGroup | None") -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, ffn // parts, bias=False)
        self.fc2 = nn.Linear(ffn // parts, hidden, bias=False)
        self.shared = Group(group if parts > 1 else None)

    def forward(self, x: Tensor) -> Tensor:
        group = self.shared.group
        inner = nn.functional.gelu(self.fc1(x if group is None else Enter.apply(x, group)))
        output = self.fc2(inner)
        return output if group is None else Leave.apply(output, group)


def flatten_gathers() -> None:
    """DeepSpeed gathers a tensor of three dims into a flat buffer, which gloo refuses: it gets a flat one."""
    real = deepspeed.comm.all_gather_into_tensor

    def gather(output: Tensor, own: Tensor, *args, **settings):
        return real(output, own.reshape(-1) if output.dim() == 1 else own, *args, **settings)

    deepspeed.comm.all_gather_into_tensor = gather


def main() -> None:
    """Time it and write the result."""
    flags = ranks.layer_flags(__doc__).parse_args()
    if flags.esp not in (1, flags.tp):
        sys.exit(f"error: DeepSpeed cuts an expert over all {flags.tp} ranks of tp or not at all, not over {flags.esp}")
    device = ranks.prepare()
    deepspeed.init_distributed(dist_backend="nccl" if HAS_GPU else "gloo", verbose=False)
    if not HAS_GPU:
        flatten_gathers()
    places = Places(flags.tp) if flags.tp > 1 else None
    groups.mpu = places
    torch.manual_seed(1)
    expert = Expert(flags.hidden, flags.ffn, flags.esp, places.sharing if places else None)
    layer = MoE(
        flags.hidden,
        expert,
        num_experts=flags.num_experts,
        ep_size=flags.ep,
        k=flags.topk,
        capacity_factor=flags.capacity_factor,
        min_capacity=MIN_CAPACITY,
        drop_tokens=flags.capacity_factor > 0,
        use_rts=False,
        top2_2nd_expert_sampling=False,
        enable_expert_tensor_parallelism=flags.esp > 1,
    )
    layer.set_deepspeed_parallelism()
    layer.to(device)
    generator = torch.Generator().manual_seed(100 + dist.get_rank() // flags.tp)
    tokens = torch.randn(1, flags.tokens, flags.hidden, generator=generator).to(device)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        output, balance, _ = layer(tokens.clone().requires_grad_())
        (output.float().pow(2).mean() + 0.01 * balance).backward()

    times = ranks.time_rounds(step, flags.warmup, flags.iters, device)
    ranks.finish(flags.json, "deepspeed", deepspeed.__version__, times)


if __name__ == "__main__":
    main()
