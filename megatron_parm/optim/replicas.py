"""Whether replicas of a parameter are still equal, bit by bit: a copy that differs was computed wrongly. Floor 5.

Dense parameters are compared over dp, and over tp where every rank holds them whole; experts over edp. Replicas start
equal and get the same updates, so a difference is a fault of memory, of a processor, or of this program.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron_parm.parallel.context import Axis, ParallelContext
from megatron_parm.parallel.sharding import spec_of
from megatron_parm.parallel.transport import gather_text


def differing_replicas(parameters: Mapping[str, nn.Parameter], ctx: ParallelContext) -> list[str]:
    """One line for each parameter whose replicas differ, the same on all ranks of the world. Call on all ranks.

    With three replicas or more the line names the ranks that are not of the majority, with two it names both.
    """
    digests = {name: _digest(parameter) for name, parameter in parameters.items()}
    lines = []
    for axis in (ctx.dp, ctx.tp, ctx.edp):
        lines += _compare({name: digests[name] for name, p in parameters.items() if _is_copied(p, axis)}, axis)
    found = {line for text in gather_text(json.dumps(lines), ctx.world) for line in json.loads(text)}
    return sorted(found)


def _is_copied(parameter: nn.Parameter, axis: Axis) -> bool:
    spec = spec_of(parameter)
    return (spec.role == "expert") == (axis.name == "edp") and not spec.is_cut_by(axis.name)


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]


def _compare(digests: dict[str, str], axis: Axis) -> list[str]:
    if axis.size == 1:
        return []
    everyone = [json.loads(text) for text in gather_text(json.dumps(digests), axis)]
    lines = []
    for name in digests:
        held = [one[name] for one in everyone]
        (most, votes), *others = Counter(held).most_common()
        if not others:
            continue
        has_majority = votes > axis.size / 2
        odd = [rank for rank, digest in zip(axis.ranks, held, strict=True) if not has_majority or digest != most]
        lines.append(f"{name} on rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} of {axis.name}")
    return lines
