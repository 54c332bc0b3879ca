"""How fast MKL, oneDNN and the engine's choice multiply float32 matrices on this processor:
billions of operations a second of processor time.

Layers forward on a whole batch, on as many rows as a Poisson batch may have, one record's weight
gradient, and few rows: rows x inner x columns. One thread, in turns.

Run: ``python benchmarks/multiplication.py [--out benchmarks/results]``.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic import multiplication
from dpoptim.gradients.arithmetic.multiplication import linear, onednn_is_faster
from dpoptim.gradients.arithmetic.onednn import transposed_product
from saving import save_csv

SHAPES = {
    "MLP, first layer": (256, 784, 256),
    "GPT, up": (2048, 256, 1024),
    "GPT, down": (2048, 1024, 256),
    "GPT, head": (2048, 256, 8192),
    "MLP, first layer, 270 records": (270, 784, 256),
    "GPT, up, 17 records": (2176, 256, 1024),
    "GPT, down, 17 records": (2176, 1024, 256),
    "ViT, up, 65 records": (4160, 192, 768),
    "ViT, down, 65 records": (4160, 768, 192),
    "ViT, out, 65 records": (4160, 192, 192),
    "LSTM, one step": (64, 128, 512),
    "1 row": (1, 512, 512),
    "4 rows": (4, 512, 512),
    "33 rows": (33, 512, 512),
}
# weight gradients
RECORDS = {"GPT, up, one record": (1024, 128, 256), "ViT, up, one record": (768, 64, 192)}
ROUNDS = 31


def billions_per_second(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> float:
    started = time.thread_time()
    product(x, w)
    return 2e-9 * len(x) * w.numel() / (time.thread_time() - started)


def in_blocks(x: Tensor, w: Tensor) -> Tensor:
    """`linear` without compiled functions."""
    with patch.object(multiplication, "compiles_rows", lambda: False):
        return linear(x, w)


def by_columns(x: Tensor, w: Tensor) -> Tensor:
    return transposed_product(x.T, w.T)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for name, (m, k, n) in (SHAPES | RECORDS).items():
        ours = linear if name in SHAPES or not onednn_is_faster() else by_columns
        libraries = {"MKL": lambda x, w: x @ w.T, "ours": ours}
        if name in SHAPES and onednn_is_faster():
            libraries["oneDNN, in blocks"] = in_blocks
        x, w = torch.randn(m, k), torch.randn(n, k)
        found: dict[str, list[float]] = {library: [] for library in libraries}
        for _ in range(ROUNDS):
            for library, product in libraries.items():
                found[library].append(billions_per_second(product, x, w))
        speeds = {library: round(statistics.median(each)) for library, each in found.items()}
        rows.append({"product": name, "rows": m, "inner": k, "columns": n, **speeds})
        print(rows[-1], flush=True)
    print(f"{torch.cpu.get_capabilities()['cpu_name']}: oneDNN is chosen: {onednn_is_faster()}")
    rows = [{**dict.fromkeys(rows[0], ""), **row} for row in rows]  # a column that some lack
    save_csv(rows, asked.out / "multiplication.csv")


if __name__ == "__main__":
    main()
