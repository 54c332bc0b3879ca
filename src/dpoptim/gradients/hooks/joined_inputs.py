"""Several inputs of each record in one call of a model, such as ``model(torch.cat((a, b)))``.

Inside, a record's inputs come one after the other, as the rows of a record do; see
`Isolation.joined`.
"""

from typing import Any

from torch import Tensor

from dpoptim.errors import PrivacyError
from dpoptim.runtime.torch_internals import pytree


def by_records(given: Any, rows: int) -> tuple[Any, int]:
    """Put one batch after another of ``rows`` inputs as each record's own.

    Returns:
        also how many inputs there are in all; 0: each record has one.

    Raises:
        PrivacyError: a tensor of other length is among them, such as a mask of positions: one day
            it may be as long.
    """
    lengths = {len(leaf) for leaf in pytree.tree_leaves(given) if _has_rows(leaf)}
    if len(lengths) > 1:
        raise PrivacyError(OTHERS.format("is given"))
    total = next(iter(lengths), rows)
    several = total > rows and total % rows == 0
    return (_turned(given, total // rows), total) if several else (given, 0)


def by_batches(returned: Any, total: int, rows: int) -> Any:
    """Undo `by_records`. PrivacyError: not all of it are ``total`` rows."""
    if any(len(leaf) != total for leaf in pytree.tree_leaves(returned) if _has_rows(leaf)):
        raise PrivacyError(OTHERS.format("returns"))
    return _turned(returned, rows)


OTHERS = (
    "several inputs of each record go through the model in one call, and not all tensors that it "
    "{} have one row for each of them, so that nobody can tell which are records'. Fix: "
    "model(a) and model(b), not model(torch.cat((a, b)))."
)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _turned(tree: Any, parts: int) -> Any:
    def turn(leaf: Any) -> Any:
        rows = _has_rows(leaf)
        return leaf.unflatten(0, (parts, -1)).transpose(0, 1).flatten(0, 1) if rows else leaf

    return pytree.tree_map(turn, tree)
