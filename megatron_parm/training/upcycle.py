"""Upcycling: the checkpoint of a dense model fills one with experts, each a copy of the feed-forward. Floor 7.

The router keeps its initial weights. Where the weights of a token's experts sum to 1 and no token is dropped, the model
starts with the function of the dense one. Source: Komatsuzaki et al. 2022; Megatron's `--moe-use-upcycling`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_parm.models.build import BuiltModel
from megatron_parm.moe.layer import MoELayer
from megatron_parm.parallel.sharding import ShardSpec, saved_tensors, spec_of

# an expert's parameter -> that of the dense feed-forward, which lacks the dim of experts
DENSE_NAMES = {
    "experts.weight1": "linear_fc1.weight",
    "experts.bias1": "linear_fc1.bias",
    "experts.weight2": "linear_fc2.weight",
    "experts.bias2": "linear_fc2.bias",
}


@dataclass(frozen=True)
class Upcycling:
    """What is read from a dense checkpoint: `whole` as it is, and the feed-forward parts that `copies` become."""

    whole: dict[str, tuple[Tensor, ShardSpec]]
    parts: dict[str, tuple[Tensor, ShardSpec]]
    copies: dict[str, nn.Parameter]

    @torch.no_grad()
    def spread(self) -> None:
        """Copy what was read into every expert of this rank."""
        for name, experts in self.copies.items():
            experts.copy_(self.parts[name][0].expand_as(experts))


def plan_upcycling(built: BuiltModel) -> Upcycling:
    """The tensors of the dense checkpoint by their names, each the box that this rank needs."""
    parts, copies, own = {}, {}, set()
    for path, module in built.model.named_modules():
        if not isinstance(module, MoELayer):
            continue
        own |= {f"{path}.{name}" for name in saved_tensors(module)}
        for name, parameter in module.named_parameters():
            if name in DENSE_NAMES:
                dense = f"{path}.{DENSE_NAMES[name]}"
                spec = _without_experts(spec_of(parameter))
                parts[dense] = parameter.new_empty(spec.local_shape).detach(), spec
                copies[dense] = parameter
    tensors = saved_tensors(built.model)
    whole = {name: (t.detach(), spec_of(t)) for name, t in tensors.items() if name not in own}
    return Upcycling(whole, parts, copies)


def _without_experts(spec: ShardSpec) -> ShardSpec:
    cuts = tuple(replace(cut, dim=cut.dim - 1) for cut in spec.cuts if cut.dim > 0)
    return replace(spec, global_shape=spec.global_shape[1:], cuts=cuts)
