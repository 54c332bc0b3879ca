"""Privacy bugs of rows that noisy counts select, put into this library while a ``with`` lasts; for
testing detectors.
"""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from dpoptim.distributed import table_totals
from dpoptim.gate import GaussianSum, SelectedRows, planned, row_selection
from dpoptim.gradients.accumulation import table_sums
from dpoptim.noise.few_rows import FewRows

Fault = AbstractContextManager[Any]


def map_not_clipped() -> Fault:
    """Every row that a record looks up counts as a record."""
    return patch.object(
        table_totals, "weights_of", lambda rows: torch.full_like(rows, table_sums.ONE)
    )


def lookups_counted_as_often_as_made() -> Fault:
    """A row that a record looks up again counts again."""

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def unique(x: Tensor, **options: Any) -> Any:
            return torch.unique(x, **options) if options else x

    return patch.object(table_totals, "torch", Torch())


def rows_selected_without_noise() -> Fault:
    def scores(query: SelectedRows, counts: Any, step: int) -> Any:
        return np.where(counts > 0, np.inf, -np.inf)

    return patch.object(SelectedRows, "scores", scores)


def false_positives_left_out() -> Fault:
    return patch.object(
        row_selection, "rare_heads", lambda coins, count, chance: np.empty(0, np.int64)
    )


def no_noise_on_false_positives() -> Fault:
    """Rows whose sum is zero get none, so they show that nobody touched them."""
    honest = planned.add_normal

    def add(stream: Any, out: Any, std: float) -> None:
        parts = [out] if isinstance(out, Tensor) else out
        empty = [each == 0 for each in parts]
        honest(stream, out, std)
        for each, zero in zip(parts, empty, strict=True):
            each[zero] = 0.0

    return patch.object(planned, "add_normal", add)


def noise_only_in_rows_looked_up() -> Fault:
    """What is released of a large table shows which rows no record looked up."""
    honest = planned.add_normal

    def add(stream: Any, out: Any, std: float) -> None:
        for each in [out] if isinstance(out, Tensor | FewRows) else out:
            if isinstance(each, FewRows):
                honest(stream, each.value, std)
                each.write()
            else:
                honest(stream, each, std)

    return patch.object(planned, "add_normal", add)


def counts_not_charged() -> Fault:
    """Gradients get the noise that they would have without counts."""
    honest = GaussianSum.standard_deviation.fget
    assert honest is not None
    return patch.object(SelectedRows, "standard_deviation", property(honest))
