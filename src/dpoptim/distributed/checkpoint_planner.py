"""`torch.distributed.checkpoint` plans who writes which boxes of which tensors, and who reads them.

Saving is its ``save``, with a planner that knows `Boxes` and storage that leaves the file to the
caller. Resuming asks its resharding alone which boxes are wanted: no rank waits for another.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dpoptim.distributed.rank_signals import portable_error
from dpoptim.gradients.accumulation.boxes import Boxes, Offsets, box_of

Write = Callable[[Iterator[Tensor]], Sequence[Any]]  # boxes; returns where each of them lies
Chunk = tuple[Offsets, tuple[int, ...]]  # first index, and length on each axis
Table = dict[str, list[Any]]  # of each tensor: first index, sizes, rank and place of its boxes


def save_boxes(
    found: Mapping[str, Boxes], write: Write, group: dist.ProcessGroup
) -> tuple[BaseException | None, list[int], Table]:
    """Let each rank write its share of all boxes; all ranks together.

    Args:
        found: the boxes that this rank has, by the tensors' names.
        write: writes this rank's share.
        group: of all ranks, on the CPU.

    Returns:
        the error of ``write`` on this rank, the ranks on which there was one, and, on rank 0, where
        boxes lie.
    """
    storage = OwnFiles(write)
    try:
        save(dict(found), storage_writer=storage, planner=BoxPlanner(), process_group=group)
    except CheckpointException as error:
        return storage.failure, sorted(error.failures), {}
    return None, [], storage.table


class BoxPlanner(DefaultSavePlanner):
    """Plans for `Boxes`: those that several ranks have are written by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self._parts: dict[MetadataIndex, Tensor] = {}
        items = []
        for name, boxes in self.state_dict.items():
            for offsets, part in boxes.parts:
                index = MetadataIndex(name, offsets)
                self._parts[index] = part
                data = TensorWriteData(
                    chunk_of((offsets, tuple(part.shape))),
                    TensorProperties(dtype=boxes.dtype),
                    torch.Size(boxes.shape),
                )
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._parts[index]


class OwnFiles(StorageWriter):
    """Storage of which PyTorch knows nothing but where boxes lie.

    Attributes:
        failure: of this rank's ``write``.
        table: on rank 0, once all is written.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self.failure: BaseException | None = None
        self.table: Table = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        boxes: list[Any] = [planner.resolve_data(item) for item in plan.items]
        try:
            places = self._write(iter(boxes))
        except BaseException as error:
            self.failure = error
            raise portable_error(error) from None
        results: Future[list[WriteResult]] = Future()
        results.set_result(
            [
                WriteResult(item.index, box.nbytes, (list(box.shape), place))
                for item, box, place in zip(plan.items, boxes, places, strict=True)
            ]
        )
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for rank, written in enumerate(results):
            for each in written:
                sizes, place = each.storage_data
                entry = [list(each.index.offset or ()), sizes, rank, place]
                self.table.setdefault(each.index.fqn, []).append(entry)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def plan_reads(boxes: Boxes, stored: Sequence[Chunk]) -> dict[int, list[tuple[Offsets, Tensor]]]:
    """Plan what to read of a tensor's stored boxes: where, and into which views of ``boxes``.

    Raises:
        ValueError: they do not have all of it.
    """
    wanted: dict[int, list[tuple[Offsets, Tensor]]] = defaultdict(list)
    missing = sum(part.numel() for _, part in boxes.parts)
    for item in create_read_items_for_chunk_list(
        "",
        TensorStorageMetadata(
            TensorProperties(dtype=boxes.dtype), torch.Size(boxes.shape), [*map(chunk_of, stored)]
        ),
        [chunk_of((offsets, tuple(part.shape))) for offsets, part in boxes.parts],
    ):
        _, part = boxes.parts[item.dest_index.index or 0]
        into = box_of(part, tuple(item.dest_offsets), tuple(item.lengths))
        wanted[item.storage_index.index or 0].append((tuple(item.storage_offsets), into))
        missing -= into.numel()
    if missing:
        raise ValueError(
            "resume: the checkpoint lacks a part of a tensor. Fix: give what private.save(path) "
            "wrote."
        )
    return wanted


def chunk_of(chunk: Chunk) -> ChunkStorageMetadata:
    offsets, sizes = chunk
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
