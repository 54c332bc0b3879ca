"""Several inputs of each record in one call of a model, such as ``model(torch.cat((a, b)))``.

Inside, a record's inputs come one after the other, as the rows of a record do; see
`Isolation.joined`.
"""

from typing import Any

from torch import Tensor

from dpoptim.runtime.torch_internals import pytree


def by_records(given: Any, total: int, rows: int) -> Any:
    """Put one batch after another of ``rows`` inputs, ``total`` in all, as each record's own."""
    return _turned(given, total, total // rows)


def by_batches(returned: Any, total: int, rows: int) -> Any:
    """Undo `by_records`."""
    return _turned(returned, total, rows)


def _turned(tree: Any, total: int, parts: int) -> Any:
    def turn(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != total:
            return leaf
        return leaf.unflatten(0, (parts, -1)).transpose(0, 1).flatten(0, 1)

    return pytree.tree_map(turn, tree)
