"""Numbers that a model compares its data with, as it does to tell padding.

Made-up records have none of them but by chance, so that all look equally long: a model that sorts
its records by lengths leaves these where they are. Records with such numbers do not.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from dpoptim.runtime.torch_internals import DispatchMode, pytree
from dpoptim.training.trials.made_up_records import Sample
from dpoptim.training.trials.picked_positions import storage_of

# Operators that compare, and what to add to a number for one on whose other side records are not.
COMPARISONS = {"eq": (0,), "ne": (0,), "le": (0,), "ge": (0,), "lt": (-1,), "gt": (1,)}
# the same for one on either side
BOTH_SIDES = {"eq": (0,), "ne": (0,), "le": (0, 1), "gt": (0, 1), "lt": (-1, 0), "ge": (-1, 0)}
# the comparison that it is from the other side
MIRRORED = {"eq": "eq", "ne": "ne", "le": "ge", "ge": "le", "lt": "gt", "gt": "lt"}
# Operators that leave out labels which are a number, and the places of these two among arguments.
IGNORING = {"nll_loss_forward": (1, 4), "nll_loss2d_forward": (1, 4)}
# Operators that look for what is no number, and for what.
INFINITE = {"isinf": math.inf, "isposinf": math.inf, "isneginf": -math.inf}
LOOKING = (
    *INFINITE,
    "isnan",
    "isfinite",
    "nan_to_num",
    "nansum",
    "nanmean",
    "nanmedian",
    "nanquantile",
)
# Operators that hand numbers over as they are; views have the memory of what they show.
MOVES = ("_to_copy", "clone", "cat", "stack", "gather", "index", "index_select", "copy", "repeat")
# Those that hand over some: what a loss compares with the largest of a batch, records may have. Of
# models, which compare lengths so, longer ones might be out of range, and hide what else is found.
SELECTS = ("max", "min", "amax", "amin", "aminmax", "maximum", "minimum", "sort", "topk", "abs")
MOST_NUMBERS = 8

Places = frozenset[int]


class ComparedNumbers(DispatchMode):
    """Follows a call's tensors of records through a model, up to its parameters.

    Args:
        model: whose parameters end it: what a layer makes of data is compared with any number.
        leaves: of the call.
        comparisons: operators that compare, and what is added to the number.
        moves: operators whose results have the numbers that they are given.

    Attributes:
        found: by place among the leaves, the numbers that the model compares them with; 0 for what
            it computes of them first, as the norms of frames.
    """

    def __init__(
        self,
        model: nn.Module,
        leaves: Sequence[Any],
        comparisons: Mapping[str, tuple[int, ...]] = COMPARISONS,
        moves: Sequence[str] = MOVES,
    ) -> None:
        super().__init__()
        self._comparisons, self._moves = comparisons, moves
        self.found: dict[int, set[float]] = {}
        self.looks = False
        self._learnt = {storage_of(p) for p in model.parameters()}
        # by storage: the places whose numbers it has as they are, and those it is computed of
        self._of = WeakIdKeyDictionary()
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and (storage := storage_of(leaf)) is not None:
                self._of[storage] = frozenset({place}), frozenset[int]()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        held, computed = self._places(given)
        name = func.__name__.split(".")[0]
        self.looks |= name in LOOKING or (name in ("eq", "ne") and args[0] is args[1])
        if not held and not computed:
            return func(*args, **(kwargs or {}))
        self._see(name, args, held, computed)
        result = func(*args, **(kwargs or {}))
        if self._learnt.isdisjoint(map(storage_of, given)):
            for t in pytree.tree_leaves(result):
                if isinstance(t, Tensor):
                    self._made_of(t, name, held, computed)
        return result

    def _see(self, name: str, args: tuple[Any, ...], held: Places, computed: Places) -> None:
        """Note what an operator compares with what."""
        if name in self._comparisons:
            first = isinstance(args[0], Tensor) and any(self._places([args[0]]))
            other = args[1] if first else args[0]
            for more in self._comparisons[name if first else MIRRORED[name]]:
                self._note(held, number_of(other, more))
            self._note(computed, 0.0)
        elif name in IGNORING:
            labels, ignored = (args[place] for place in IGNORING[name])
            self._note(self._places([labels])[0], float(ignored))
        elif name in ("isnan", "isfinite", *INFINITE):
            self._note(held, INFINITE.get(name, math.nan))

    def _places(self, given: list[Tensor]) -> tuple[Places, Places]:
        known = [self._of.get(storage_of(t), (frozenset(), frozenset())) for t in given]
        held = frozenset[int]().union(*(places for places, _ in known))
        return held, frozenset[int]().union(*(places for _, places in known))

    def _note(self, places: Places, number: float | None) -> None:
        if number is not None:
            for place in places:
                self.found.setdefault(place, set()).add(number)

    def _made_of(self, t: Tensor, name: str, held: Places, computed: Places) -> None:
        storage = storage_of(t)
        if storage is None or storage in self._of:  # a view
            return
        moved = name in self._moves
        self._of[storage] = (held, computed) if moved else (frozenset(), held | computed)


def number_of(x: Any, more: int) -> float | None:
    """A number, or that of a tensor that holds one, and some more; None: there are several."""
    if isinstance(x, Tensor) and x.numel() != 1:
        return None
    return float(x) + more


@torch.no_grad()
def compared_numbers(model: nn.Module, sample: Sample) -> dict[int, list[float]]:
    """The numbers that a model looks for in what it is given, but for those that records have.

    Returns:
        For each place among the call's leaves that has some: up to `MOST_NUMBERS` numbers.
    """
    leaves = pytree.tree_leaves((sample.args, sample.kwargs))
    with ComparedNumbers(model, leaves) as compared:
        sample.call(model)
    numbers: dict[int, list[float]] = {}
    for place, found in compared.found.items():
        x = leaves[place]
        known = () if x.is_floating_point() else x.unique().tolist()
        new = [n for n in found if n not in known and representable(n, x)]
        if new:
            numbers[place] = farthest_first(new)[:MOST_NUMBERS]
    return numbers


def farthest_first(numbers: Sequence[float]) -> list[float]:
    """Numbers in one order in every process: NaN, then those least like numbers of classes."""
    return sorted(numbers, key=lambda n: (not math.isnan(n), -abs(n), n))


def representable(number: float, x: Tensor) -> bool:
    """Whether a tensor of this dtype can hold a number."""
    if x.is_floating_point():
        return True
    if x.dtype == torch.bool or not number.is_integer():
        return False
    limits = torch.iinfo(x.dtype)
    return limits.min <= number <= limits.max


def with_numbers(sample: Sample, numbers: Mapping[int, list[float]]) -> Sample:
    """The records, of which each ends in another number of positions that have such a number.

    As padded records do. What is one number a record is one of them or is not.
    """

    def change(x: Tensor, place: int) -> Tensor:
        if place not in numbers:
            return x
        x, rows = x.clone(), len(x)
        values = torch.tensor(numbers[place], dtype=torch.float64, device=x.device).to(x.dtype)
        drawn = values[torch.arange(rows, device=x.device) % len(values)]
        if x.dim() == 1:
            return torch.where(torch.arange(rows, device=x.device) % 3 == 1, drawn, x)
        # longer and shorter records in turn, and the longest last
        kept = 1 + torch.arange(rows, device=x.device) * 7 % x.shape[1]
        kept[-1] = x.shape[1]
        tail = torch.arange(x.shape[1], device=x.device) >= kept[:, None]
        shape = (rows, x.shape[1], *[1] * (x.dim() - 2))
        return torch.where(tail.view(shape), drawn.view(rows, *[1] * (x.dim() - 1)), x)

    return sample.map_places(change)
