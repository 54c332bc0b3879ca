"""Tables as data sets of PyTorch: rows clipped to their public bound, targets, weights."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from dpoptim.data.sparse_rows import SparseRows
from dpoptim.estimators.table import ClippedRows, clip_rows


def data_set_of(
    x: Any, targets: Tensor, weights: NDArray[np.float64] | None, *, norm: float
) -> TensorDataset:
    """Rows, (n, features), targets, and weights of losses, (n,), if there are any; float32."""
    columns = [table_of_rows(x, norm), targets]
    if weights is not None:
        columns.append(torch.from_numpy(weights.astype(np.float32)))
    return TensorDataset(*columns)


def table_of_rows(x: Any, norm: float) -> Any:
    """The rows, clipped, as a tensor of float32; or what a `TensorDataset` takes for one."""
    if isinstance(x, SparseRows):
        return SparseTensor(ClippedRows(x, norm))
    return torch.from_numpy(clip_rows(x, norm).astype(np.float32))


class SparseTensor:
    """Clipped rows of a sparse table, float32: what `TensorDataset` and its readers ask a tensor.

    Rows are made dense as they are read.
    """

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, rows: ClippedRows) -> None:
        self._rows = rows
        self.shape = torch.Size(rows.shape)

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def dim(self) -> int:
        return len(self.shape)

    def data_ptr(self) -> int:
        """A number that no other table has; see `training.batches.repeated_records`."""
        return id(self._rows)

    def stride(self) -> tuple[int, ...]:
        return (self.shape[1], 1)

    def index_select(self, axis: int, index: Tensor) -> Tensor:
        """Rows, in the order of ``index``; dense. Args: axis: 0."""
        return torch.from_numpy(self._rows[index.cpu().numpy()].astype(np.float32))

    def __getitem__(self, index: Any) -> Tensor:
        return self.index_select(0, torch.as_tensor(index).reshape(-1)).view(
            *torch.as_tensor(index).shape, self.shape[1]
        )
