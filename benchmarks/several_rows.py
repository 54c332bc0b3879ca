"""Steps of records that own K rows, as views of an image, beside steps with a row a record.

    python benchmarks/several_rows.py --out benchmarks/results

Private steps (forward, backward, noise, optimizer; no views are made) take turns, K by K; medians
of their processor time on one thread. Made-up images of 28 x 28; the CNN is `dpoptim train`'s.
"""

import statistics
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.runs.models import build_model
from one_table import write_table

RECORDS, STEPS, SKIPPED = 2_000, 40, 3
ROWS = (1, 2, 4, 8, 16)
BATCHES = {"mlp": 128, "cnn": 64}


def steps(model: str, batch_size: int, rows: int) -> Iterator[float]:
    """Seconds of one step after the other."""
    torch.manual_seed(0)
    module = build_model(model, (1, 28, 28), 10)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = torch.randn(RECORDS, 1, 28, 28), torch.randint(0, 10, (RECORDS,))
    if rows > 1:
        x, y = x[:, None].expand(-1, rows, *x.shape[1:]), y[:, None].expand(-1, rows)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=RECORDS, batch_size=batch_size, steps=STEPS, noise_multiplier=1.0, delta=1e-5
    )
    data = TensorDataset(x, y)
    with dpoptim.attach(plan, module, optimizer, data, rows_per_record=rows) as private:
        start = time.process_time()
        for images, labels in private.batches():
            private.backward(F.cross_entropy(module(images), labels, reduction="none"))
            optimizer.step()
            yield time.process_time() - start
            start = time.process_time()


def compared(model: str, batch_size: int, rounds: int) -> Iterator[dict[str, object]]:
    """Lines of a model: milliseconds of a step, and how many of those with a row a record."""
    runs = [steps(model, batch_size, rows) for rows in ROWS]
    found = [[next(run) for run in runs] for _ in range(SKIPPED + rounds)][SKIPPED:]
    medians = [statistics.median(column) for column in zip(*found, strict=True)]
    for rows, took in zip(ROWS, medians, strict=True):
        yield {
            "model": model,
            "batch": batch_size,
            "rows a record": rows,
            "ms": round(1e3 * took, 2),
            "of one row": round(took / medians[0], 2),
        }


def lines(rounds: int = STEPS - SKIPPED) -> Iterator[dict[str, object]]:
    """Lines of the table."""
    for model, batch_size in BATCHES.items():
        yield from compared(model, batch_size, rounds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_table("several_rows", __doc__, lines())
