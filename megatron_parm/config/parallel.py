"""How the ranks share the work. Floor 1. The arithmetic of the grid itself is parallel/grid.py."""

# ruff: noqa: RUF009 - flag() is dataclasses.field

from dataclasses import dataclass
from typing import Literal

from megatron_parm.config.fields import flag

Backend = Literal["auto", "gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the process axes, and how processes talk."""

    tensor_model_parallel_size: int = flag(
        1, help="ranks that share each dense layer (tp, the paper's MP)", unit="ranks", at_least=1
    )
    pipeline_model_parallel_size: int = flag(
        1, help="pipeline stages (pp); this release runs one stage", unit="stages", at_least=1
    )
    expert_model_parallel_size: int = flag(
        1, help="ranks over which the experts are spread (ep)", unit="ranks", at_least=1
    )
    expert_tensor_parallel_size: int | None = flag(
        None,
        help="ranks that share each expert (esp, the paper's ESP)",
        unit="ranks",
        at_least=1,
        none_means="the tensor-parallel size",
    )
    sequence_parallel: bool = flag(
        False, help="hold only a slice of the sequence on each tensor-parallel rank, where layers are not cut over them"
    )
    distributed_backend: Backend = flag(
        "auto", help="transport between processes; auto: nccl for CUDA devices, else gloo"
    )
    distributed_timeout_minutes: float = flag(
        10.0, help="longest wait of a collective before the run is given up", unit="minutes", above=0
    )
    local_rank: int | None = flag(
        None,
        help="place of this process on its node, as old launchers pass it",
        none_means="read from LOCAL_RANK",
        at_least=0,
        is_per_rank=True,
    )

    @property
    def esp(self) -> int:
        """Ranks that share each expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size
