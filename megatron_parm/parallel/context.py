"""What a rank knows of its groups: one `Axis` each, joined in a frozen `ParallelContext`. Floor 3.

Both are values passed as arguments; nothing in the project keeps them in module state. A layer takes the axis it needs,
not the whole context.
"""

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch

from megatron_parm.observe.trace import NO_TRACE, Trace
from megatron_parm.parallel.grid import RankGrid

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Axis:
    """One process axis as seen by this rank.

    `size` ranks, this one at place `rank`; `ranks` are their global numbers in axis order. `group` is None exactly when
    the axis has one rank: no collective is ever needed there. `trace` is told of every collective.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: "ProcessGroup | None"
    trace: Trace = field(default=NO_TRACE, compare=False, repr=False)

    @staticmethod
    def single(name: str, rank: int = 0) -> "Axis":
        """An axis of one rank, for a single process."""
        return Axis(name, 1, 0, (rank,), None)


@dataclass(frozen=True)
class ParallelContext:
    """Every axis of this rank, and its node's name. Paper's words: tp is MP, esp is ESP, ep is EP, ep_esp is EP&ESP.

    `ends` joins the first and the last stage of a pipeline; on a stage between them it is this rank alone.
    dp_gradients and edp_gradients have the ranks of dp and edp and groups of their own: a reduction that runs beside
    backward must not share a group with a collective of the model, even where the ranks are the same.
    `inside` and `between` cut ep_esp by nodes: its ranks on this node, and those at this rank's place on each node.
    Where nodes do not hold equal runs of whole experts, `inside` is all of ep_esp and `between` this rank alone.
    """

    grid: RankGrid
    rank: int
    device: torch.device
    world: Axis
    stage: Axis
    pp: Axis
    dp: Axis
    tp: Axis
    edp: Axis
    ep: Axis
    esp: Axis
    ep_esp: Axis
    dp_gradients: Axis
    edp_gradients: Axis
    inside: Axis
    between: Axis
    node: str = ""
    ends: Axis = Axis("ends", 1, 0, (0,), None)

    @staticmethod
    def single(device: torch.device | None = None) -> "ParallelContext":
        """The context of one process on its own: every axis has size 1. Needs no torch.distributed."""
        dense, experts = ("world", "stage", "pp", "dp", "tp"), ("edp", "ep", "esp", "ep_esp", "inside", "between")
        axes = {name: Axis.single(name) for name in (*dense, *experts, "dp_gradients", "edp_gradients")}
        return ParallelContext(RankGrid(1), 0, device or torch.device("cpu"), node="", **axes)

    def axis(self, name: str) -> Axis:
        """The axis called `name`."""
        found = getattr(self, name)
        assert isinstance(found, Axis)
        return found

    @property
    def trace(self) -> Trace:
        """Where this rank notes what it does when."""
        return self.world.trace

    def traced(self, trace: Trace) -> "ParallelContext":
        """The same groups, whose collectives are told to `trace`."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        traced = {name: replace(axis, trace=trace) for name, axis in values.items() if isinstance(axis, Axis)}
        return ParallelContext(**{**values, **traced})
