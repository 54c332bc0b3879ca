"""How fast the two libraries that PyTorch has multiply float32 matrices on this processor: billions of operations a second.

Layers forward on a whole batch, and one record's weight gradient: rows x inner x columns. One thread; the two take turns.

Run: ``python benchmarks/multiplication.py [--out benchmarks/results]``.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dpoptim.gradients.multiplication import by_onednn, onednn_is_faster
from saving import save_csv

SHAPES = {
    "softmax regression": (500, 784, 10),
    "MLP, first layer": (256, 784, 256),
    "GPT, up": (2048, 256, 1024),
    "GPT, down": (2048, 1024, 256),
    "GPT, head": (2048, 256, 8192),
    "GPT, up, one record": (1024, 128, 256),
    "ViT, up, one record": (768, 64, 192),
    "LSTM, one step": (64, 128, 512),
}
ROUNDS = 31


def billions_per_second(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> float:
    started = time.perf_counter()
    product(x, w)
    return 2e-9 * len(x) * w.numel() / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    libraries = {"MKL": lambda x, w: x @ w.T, "oneDNN": by_onednn}
    rows = []
    for name, (m, k, n) in SHAPES.items():
        x, w = torch.randn(m, k), torch.randn(n, k)
        found: dict[str, list[float]] = {library: [] for library in libraries}
        for _ in range(ROUNDS):
            for library, product in libraries.items():
                found[library].append(billions_per_second(product, x, w))
        speeds = {library: round(statistics.median(each)) for library, each in found.items()}
        rows.append({"product": name, "rows": m, "inner": k, "columns": n, **speeds})
        print(rows[-1], flush=True)
    print(f"{torch.cpu.get_capabilities()['cpu_name']}: oneDNN is chosen: {onednn_is_faster()}")
    save_csv(rows, asked.out / "multiplication.csv")


if __name__ == "__main__":
    main()
