"""Tests of copies that lay records out for kernels."""

import pytest
import torch

from dpoptim.gradients.arithmetic.batch_invariant import are_dense_rows, row_by_row


@pytest.mark.parametrize("threads", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("records", [0, 1, 3, 16])
def test_records_that_lie_transposed_are_copied_whole(records: int, threads: None) -> None:
    """Every record, by whichever thread, to its own place."""
    torch.manual_seed(0)
    x = torch.randn(records, 70, 65).transpose(1, 2)
    copy = row_by_row(x)
    assert copy is not x
    assert are_dense_rows(copy)
    assert torch.equal(copy, x)
