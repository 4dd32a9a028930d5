"""Builds the optimizer of a run: AdamW or SGD, in torch's fastest kernel that works here. Floor 5."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from megatron_parm.errors import ConfigError
from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.optim.gather import ParameterGather
from megatron_parm.optim.precision import MasterWeights, Optimizer

Groups = list[dict[str, object]]
MakeOptimizer = Callable[..., torch.optim.Optimizer]


def build_optimizer(
    buffers: GradientBuffers,
    kind: str = "adam",
    *,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.999,
    adam_eps: float = 1e-8,
    sgd_momentum: float = 0.9,
    gather: ParameterGather | None = None,
    rate_factors: Mapping[str, float] | None = None,
) -> Optimizer:
    """The optimizer of every parameter of `buffers`, reading its reduced gradients there.

    `rate_factors` multiply the learning rate of the parameters they name.

    Sharded buffers give sharded masters and moments; `gather` then brings the parameters together after an update.

    `kind` is "adam" (AdamW, decoupled weight decay) or "sgd" (weight decay added to the gradient). Biases and norm
    weights (`spec.decays` False) never decay. Raises ConfigError for another kind.
    """

    def adamw(groups: Groups | list[Tensor], **kernel: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, betas=(adam_beta1, adam_beta2), eps=adam_eps, **kernel)

    def sgd(groups: Groups | list[Tensor], **kernel: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, momentum=sgd_momentum, **kernel)

    kinds: dict[str, MakeOptimizer] = {"adam": adamw, "sgd": sgd}
    if kind not in kinds:
        raise ConfigError(f"--optimizer {kind} is not known; use {' or '.join(kinds)}")
    make = kinds[kind]
    assert buffers.is_sharded == (gather is not None), "sharded weights are gathered, whole ones are not"
    masters = MasterWeights(buffers.parameters, buffers.parts)
    for name, weight in masters.weights.items():
        if weight is not masters.parameters[name]:
            weight.grad = buffers.reduced(name)
    kernel = fastest_kernel(make, masters.weights.values())
    torch_optimizer = make(_groups(masters, rate_factors or {}), **{kernel: True})
    for weight in masters.weights.values():
        torch_optimizer.state[weight] = _initial_state(kind, kernel, weight, sgd_momentum)
    return Optimizer(kind, kernel, masters, torch_optimizer, gather)


def fastest_kernel(make: MakeOptimizer, weights: Iterable[Tensor]) -> str:
    """ "fused" if torch's fused kernel runs on the dtypes and devices of `weights`, else "foreach"."""
    for dtype, device in {(weight.dtype, weight.device) for weight in weights}:
        probe = torch.zeros(1, dtype=dtype, device=device)
        probe.grad = torch.zeros_like(probe)
        try:
            make([probe], fused=True).step()
        except RuntimeError:  # torch's word for a device or dtype without the kernel
            return "foreach"
    return "fused"


def _groups(masters: MasterWeights, rate_factors: Mapping[str, float]) -> Groups:
    """Weights by whether they decay and by their factor of the learning rate; one group at least."""
    members: dict[tuple[bool, float], list[Tensor]] = {}
    for name, weight in masters.weights.items():
        if weight.numel():
            members.setdefault((masters.spec(name).decays, rate_factors.get(name, 1.0)), []).append(weight)
    groups: Groups = [
        {"params": members[key], "decays": key[0], "rate_factor": key[1]} for key in sorted(members, reverse=True)
    ]
    return groups or [{"params": [], "decays": False, "rate_factor": 1.0}]  # all that this rank holds is frozen


def _initial_state(kind: str, kernel: str, weight: Tensor, sgd_momentum: float) -> dict[str, Tensor]:
    """What torch itself would make at the first step; made now so that a checkpoint can be loaded into it."""
    if kind == "adam":
        step_device = weight.device if kernel == "fused" else torch.device("cpu")
        return {
            "step": torch.zeros((), dtype=torch.float32, device=step_device),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
    # torch starts the momentum at the first gradient, which is what zero momentum gives without dampening
    return {"momentum_buffer": torch.zeros_like(weight)} if sgd_momentum else {}
