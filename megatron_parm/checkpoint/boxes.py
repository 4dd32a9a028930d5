"""How torch DCP is told which part of each tensor a rank holds: planners bound to our `ShardSpec` boxes. Floor 6.

DCP agrees on who writes which box (a replicated one is written once, spread over ranks by size) and finds, at load, the
saved boxes that overlap a wanted one. The planners give it the boxes directly, so no DTensor, device mesh or further
process group is needed, and one process goes the same way as many.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlanner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_parm.checkpoint.manifest import Part, TensorEntry
from megatron_parm.checkpoint.paths import shard_name
from megatron_parm.errors import UntrustedCheckpointError
from megatron_parm.parallel.sharding import ShardSpec


@dataclass(frozen=True)
class Box:
    """This rank's part of a global tensor: it begins at `offsets`."""

    local: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @staticmethod
    def of(local: Tensor, spec: ShardSpec) -> "Box":
        """The box that `spec` says this rank holds."""
        return Box(local, spec.global_shape, tuple(part.start for part in spec.box))

    @staticmethod
    def whole(tensor: Tensor) -> "Box":
        """A tensor that lies on this rank alone."""
        return Box(tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box in DCP's words."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.local.size())


class BoxSavePlanner(DefaultSavePlanner):
    """Plans to write boxes. After the save `parts()` of the first rank says where everything went."""

    def __init__(self, boxes: Mapping[str, Box]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.boxes = boxes
        self._written: set[int] = set()

    def create_local_plan(self) -> SavePlan:
        """One item a box; DCP removes those that another rank writes."""
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, box.offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=box.chunk,
                        properties=TensorProperties.create_from_tensor(box.local),
                        size=torch.Size(box.global_shape),
                    ),
                )
                for name, box in self.boxes.items()
                if box.local.numel()  # of sharded optimizer state a rank may have an empty part
            ]
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of a box; a copy where safetensors would refuse it (strided, or memory shared by two names)."""
        local = self.boxes[write_item.index.fqn].local.detach().contiguous()
        if local.data_ptr() in self._written:
            local = local.clone()
        self._written.add(local.data_ptr())
        return local

    def parts(self) -> dict[str, TensorEntry]:
        """Every tensor and its parts. On the first rank only, after the save."""
        found: dict[str, TensorEntry] = {}
        for rank, plan in enumerate(self.global_plan):
            for item in plan.items:
                assert item.tensor_data is not None
                data = item.tensor_data
                part = Part(shard_name(rank), tuple(data.chunk.offsets), tuple(data.chunk.sizes))
                dtype = str(data.properties.dtype).removeprefix("torch.")
                entry = found.get(item.index.fqn, TensorEntry(tuple(data.size), dtype, ()))
                if (entry.shape, entry.dtype) != (tuple(data.size), dtype):
                    raise ValueError(
                        f"{item.index.fqn} is {entry} on one rank and {list(data.size)} {dtype} on another"
                    )
                found[item.index.fqn] = TensorEntry(entry.shape, entry.dtype, (*entry.parts, part))
        return found


class BoxLoadPlanner(LoadPlanner):
    """Plans to fill boxes, in place, from whatever saved parts overlap them."""

    def __init__(self, boxes: Mapping[str, Box]) -> None:
        self.boxes = boxes
        self.metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep what the manifest says of the saved parts."""
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """The overlaps of our boxes with the saved parts."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, box in self.boxes.items():
            if not box.local.numel():
                continue
            saved = self.metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, cast(TensorStorageMetadata, saved), [box.chunk])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Each rank reads for itself."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never unpickled: a checkpoint has tensors only."""
        raise UntrustedCheckpointError(
            f"{read_item.dest_index.fqn} is not a tensor; refused, for it would be unpickled"
        )

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The view of our box that an overlap fills."""
        local = self.boxes[read_item.dest_index.fqn].local.detach()
        starts_and_sizes = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return local[tuple(slice(start, start + size) for start, size in starts_and_sizes)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: the view was filled in place."""
