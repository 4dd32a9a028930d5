"""How the ranks share the work. Floor 1. The arithmetic of the grid itself is parallel/grid.py."""

# ruff: noqa: RUF009 - flag() is dataclasses.field

from dataclasses import dataclass
from typing import Literal

from megatron_parm.config.fields import flag
from megatron_parm.config.stage_layers import layers_by_rank, stage_layers

PipelineSchedule = Literal["auto", "1f1b", "interleaved", "zero-bubble"]
Backend = Literal["auto", "gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the process axes, and how processes talk."""

    tensor_model_parallel_size: int = flag(
        1, help="ranks that share each dense layer (tp, the paper's MP)", unit="ranks", at_least=1
    )
    pipeline_model_parallel_size: int = flag(
        1,
        help="ranks over which the layers are spread, one run of layers after the other (pp)",
        unit="ranks",
        at_least=1,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        help="cut each pipeline rank's layers into virtual stages of so many, run interleaved",
        unit="layers",
        at_least=1,
        none_means="one stage a rank",
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None,
        help="cut each pipeline rank's layers into so many virtual stages, run interleaved",
        unit="stages",
        at_least=1,
        none_means="one stage a rank",
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None,
        help="layers of the first pipeline rank, beside the embedding",
        unit="layers",
        at_least=1,
        none_means="as many as the others",
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None,
        help="layers of the last pipeline rank, beside the output layer",
        unit="layers",
        at_least=1,
        none_means="as many as the others",
    )
    pipeline_schedule: PipelineSchedule = flag(
        "auto",
        help="order of forward and backward passes over pipeline stages; auto: 1f1b, with virtual stages interleaved; "
        "zero-bubble moves the weights' gradients into the gaps",
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

    def virtual_stages(self, num_layers: int) -> int:
        """Stages on each pipeline rank, 1 without interleaving."""
        if self.num_layers_per_virtual_pipeline_stage is not None:
            of_rank = num_layers // self.pipeline_model_parallel_size
            return max(of_rank // self.num_layers_per_virtual_pipeline_stage, 1)
        return self.num_virtual_stages_per_pipeline_rank or 1

    def schedule_of_pipeline(self, num_layers: int) -> Literal["1f1b", "interleaved", "zero-bubble"]:
        """The schedule of a pipeline of several ranks: what `auto` stands for."""
        if self.pipeline_schedule != "auto":
            return self.pipeline_schedule
        return "interleaved" if self.virtual_stages(num_layers) > 1 else "1f1b"

    def stages(self, num_layers: int) -> tuple[range, ...]:
        """The layers of every pipeline stage; stage i is on pipeline rank i % pp. Only of checked settings."""
        by_rank = layers_by_rank(
            num_layers,
            self.pipeline_model_parallel_size,
            self.decoder_first_pipeline_num_layers,
            self.decoder_last_pipeline_num_layers,
        )
        return stage_layers(by_rank, self.virtual_stages(num_layers))

    @property
    def esp(self) -> int:
        """Ranks that share each expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size
