"""The last operation of a loss, by which a loop that adds one to the checked loss shows itself.

Factors that a batch decides (over its mean, its hardest records, a sum over processes) are no part
of what `attach` has tried where a loop brings them in after it, and their graph ends before they
are seen. That there is an operation more, the graph shows.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.gradients.oracle import Loss
from dpoptim.training.batches.records import made_up
from dpoptim.training.trials.deterministic_runs import put_back

# reductions, casts and other shapes: what a loop may do with what was checked
PASSED = re.compile(
    r"(Mean|Sum|ToCopy|View|UnsafeView|ReshapeAlias|Squeeze|Unsqueeze|Expand|Clone|Alias)"
    r"Backward\d*"
)
NATIVE = re.compile(r"\w+Backward\d+")  # others are a library's, and differ from call to call


def last_operation(losses: Tensor) -> str:
    """The name of what made these losses, before it was reduced; "": nothing that can be told."""
    node = losses.grad_fn
    while node is not None and PASSED.fullmatch(node.name()):
        node = next((below for below, _ in node.next_functions if below is not None), None)
    return node.name() if node is not None and NATIVE.fullmatch(node.name()) else ""


def last_of_checked(
    model: nn.Module,
    loss: Loss,
    collate: Callable[[list[Any]], Any],
    row: Any,
    rows: int,
    *,
    spread: bool,
) -> str:
    """The same of a loss on made-up records; "" where it cannot be run on these.

    Args:
        rows: of a record.
        spread: whether all processes must run the model together, which is then not tried.
    """
    if spread:
        return ""
    generator, found = torch.Generator().manual_seed(0), ""
    with put_back(model), suppress(Exception), torch.enable_grad():  # whatever the user's code does
        batch = collate([made_up(row, generator) for _ in range(2 * rows)])
        found = last_operation(loss(model, batch))
    return found
