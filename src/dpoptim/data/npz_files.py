"""Tables of numbers with labels from numpy's .npz archives."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpoptim.data.dataset import Floats


def read_npz(path: Path, target: str) -> tuple[Floats, NDArray[np.str_]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError):
        raise ValueError(
            f"{path} is not a .npz archive of plain arrays; write it with numpy.savez(path, x=..., y=...)."
        ) from None
    features = next((name for name in ("x", "X") if name in arrays), None)
    if features is None or target not in arrays:
        raise ValueError(
            f"{path} holds the arrays {', '.join(arrays) or '(none)'}; it must hold features 'x' and labels {target!r} "
            "(--target names another array)."
        )
    x, raw = arrays[features], arrays[target]
    real = np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_
    if x.ndim < 2 or not real or np.iscomplexobj(x):
        raise ValueError(f"{path}: {features!r} must be an array of real numbers (records, ...), got shape {x.shape}.")
    if raw.shape != (len(x),):
        raise ValueError(f"{path}: {target!r} has shape {raw.shape}; it must hold one label for each of {len(x)} rows.")
    with np.errstate(over="ignore"):  # too large for float32 is infinite, and refused by the caller
        x = x.astype(np.float32)
    return x, np.array([str(label) for label in raw.tolist()], dtype=np.str_)
