"""Boxes: whoever holds a tensor in parts, however cut, finds its own entries again."""

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from dpoptim.distributed.checkpoint_planner import plan_reads
from dpoptim.distributed.ranks import part_sizes
from dpoptim.gradients.accumulation.boxes import (
    Boxes,
    Stored,
    box_of,
    boxes_of_stretch,
    changed,
    whole,
)

SHAPES = [(1,), (7,), (5, 3), (2, 1, 4), (3, 2, 2, 3), (4, 0)]


def cuts(shape: tuple[int, ...], ranks: int) -> list[list[Boxes]]:
    """Ways to cut a tensor over ranks, with room for the entries: flat, and on every axis."""
    entries = math.prod(shape)
    starts = [0, *itertools.accumulate(part_sizes(entries, ranks))]
    ways = [
        [
            Boxes.of_stretch(shape, start, torch.full((stop - start,), -1.0))
            for start, stop in itertools.pairwise(starts)
        ]
    ]
    for axis, length in enumerate(shape):
        sizes = part_sizes(length, ranks)
        ways.append(
            [
                Boxes.of_part(
                    shape,
                    axis,
                    sum(sizes[:rank]),
                    torch.full((*shape[:axis], sizes[rank], *shape[axis + 1 :]), -1.0),
                )
                for rank in range(ranks)
            ]
        )
    return ways


def of(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(float(math.prod(shape))).view(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stretch_is_cut_into_boxes_in_order_and_into_few(shape: tuple[int, ...]) -> None:
    entries = math.prod(shape)
    for start, stop in itertools.combinations_with_replacement(range(entries + 1), 2):
        boxes = list(boxes_of_stretch(shape, start, stop))
        found = [box_of(of(shape), *box).flatten() for box in boxes]
        assert torch.cat([torch.zeros(0), *found]).tolist() == list(range(start, stop))
        assert len(boxes) <= 2 * len(shape) - 1


@pytest.mark.parametrize("shape", SHAPES)
def test_what_one_number_of_ranks_wrote_fills_what_any_other_has(shape: tuple[int, ...]) -> None:
    """From boxes of each cut to those of each other one, and from the whole tensor."""
    tensor = of(shape)
    ways = [way for ranks in (1, 2, 3, 5) for way in cuts(shape, ranks)]
    for way in ways:
        for boxes in way:
            boxes.fill(tensor)
    chance = random.Random(0)
    for saved, wanted in [(way, chance.choice(ways)) for way in ways]:
        pieces = [piece for boxes in saved for piece in boxes.parts]
        chunks = [(offsets, tuple(part.shape)) for offsets, part in pieces]
        copies = [part.clone() for _, part in pieces]
        assert sum(map(torch.numel, copies)) == tensor.numel()
        for boxes in wanted:
            for _, part in boxes.parts:
                part.fill_(-1)
            for number, reads in plan_reads(boxes, chunks).items():
                for offsets, into in reads:
                    into.copy_(box_of(copies[number], offsets, tuple(into.shape)))
            for offsets, part in boxes.parts:
                assert torch.equal(part, box_of(tensor, offsets, tuple(part.shape)))
        for boxes in wanted:
            boxes.fill(tensor)


def test_a_part_that_is_nowhere_is_noticed() -> None:
    boxes = Boxes.whole(torch.zeros(4, 3))
    assert len(plan_reads(boxes, [((0, 0), (3, 3)), ((3, 0), (1, 3))])) == 2
    for stored in ([], [((0, 0), (3, 3))], [((0, 0), (4, 2))]):
        with pytest.raises(ValueError, match="lacks a part of a tensor"):
            plan_reads(boxes, stored)


def test_a_tensor_of_another_shape_or_dtype_fills_nothing() -> None:
    boxes = Boxes.whole(torch.zeros(4, 3))
    for other in (torch.ones(3, 4), torch.ones(4, 3).double(), torch.ones(12)):
        stored = Stored(tuple(other.shape), other.dtype, lambda into: None)
        for source in (other, stored):
            with pytest.raises(ValueError, match="another shape or dtype"):
                boxes.fill(source)
    assert not boxes.parts[0][1].any()


def test_places_in_a_nest_have_names_of_their_own() -> None:
    nest = {"a.b": [1, 2], "a": {"b": (3,), 0: 4, "0": 5}}
    seen: list[str] = []
    again = changed(nest, lambda key, value: (seen.append(key), value)[1])
    assert again == whole(nest) == nest
    assert len(set(seen)) == len(seen) == 5
