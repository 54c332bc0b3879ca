"""What per-record weight gradients of convolutions cost by each way of forming them, beside the
ordinary weight gradient.

What limits the convolutional rows of `step_time.py`. The engine's ways take a number of records at
a time that does not depend on the batch, and include putting the results side by side ("kept"), or
each where the one before was ("record by record", for large kernels), or measuring ("compiled");
the others are the kernels alone.

Run: ``python benchmarks/convolutions.py [--out benchmarks/results]``.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

from dpoptim.gradients.arithmetic.norms import LONG_BLOCK
from dpoptim.gradients.layers import convolution
from dpoptim.gradients.layers.kernels import Compiled
from dpoptim.gradients.per_sample import native
from dpoptim.gradients.per_sample.lazy import Lazy
from dpoptim.gradients.per_sample.parts import parts_of, records_at_once
from saving import save_csv

LAYERS = {
    "CNN, first": (nn.Conv2d(1, 16, 8, 2, padding=3), (256, 1, 28, 28)),
    "CNN, second": (nn.Conv2d(16, 32, 4, 2), (256, 16, 13, 13)),
    "ResNet, 32 to 32": (nn.Conv2d(32, 32, 3, padding=1), (64, 32, 32, 32)),
    "ResNet, 64 to 64": (nn.Conv2d(64, 64, 3, padding=1), (64, 64, 16, 16)),
    "ResNet, 128 to 128": (nn.Conv2d(128, 128, 3, padding=1), (64, 128, 8, 8)),
}
TOGETHER = (1, 4, 16, 64)  # records in one convolution
ROUNDS = 9


def milliseconds(action: Callable[[], object]) -> float:
    taken = []
    for _ in range(ROUNDS + 1):
        started = time.process_time()
        action()
        taken.append(1000 * (time.process_time() - started))
    return round(statistics.median(taken[1:]), 2)


def ordinary(layer: nn.Conv2d, x: Tensor, g: Tensor) -> Tensor:
    """The sum over records, as plain training makes it: one group, with the batch as it is."""
    return torch.ops.aten.convolution_backward(
        g,
        x,
        layer.weight,
        None,
        layer.stride,
        layer.padding,
        layer.dilation,
        False,
        [0, 0],
        1,
        [False, True, False],
    )[1]


def by_torch(action: Callable[[], object]) -> float:
    """As where the package was built without compiled functions."""
    with patch.object(native, "library", lambda: None):
        return milliseconds(action)


def compiled(layer: nn.Conv2d, x: Tensor, g: Tensor) -> Callable[[], object]:
    """Gradients and their norms, a few records after the other in the same memory."""
    (chunk,) = Compiled(layer, x, g).one_by_one()
    few = min(len(x), records_at_once(chunk.entries))
    room, norms = torch.empty(few, chunk.entries), torch.empty(few, -(-chunk.entries // LONG_BLOCK))

    def form() -> None:
        for part in parts_of(slice(0, len(x)), chunk.entries):
            records = part.stop - part.start
            chunk.form_measured(part, room[:records], norms[:records], LONG_BLOCK)

    return form


def one_by_one(layer: nn.Conv2d, x: Tensor, g: Tensor) -> None:
    weight = convolution.ConvolutionRule().per_sample_grads(layer, (x,), g)["weight"]
    assert isinstance(weight, Lazy)
    (chunk,) = weight.singly.one_by_one()
    for record in range(len(x)):
        chunk.form(record)


def measure(layer: nn.Conv2d, shape: tuple[int, ...]) -> dict[str, object]:
    x = torch.randn(shape)
    g = torch.randn_like(layer(x))
    everything = slice(0, len(x))
    with torch.no_grad():
        found: dict[str, object] = {"ordinary": milliseconds(lambda: ordinary(layer, x, g))}
        found["kept"] = milliseconds(
            lambda: convolution.formed_by_groups(layer, x, g, everything, len(x))
        )
        found["record by record"] = by_torch(lambda: one_by_one(layer, x, g))
        found["compiled"] = milliseconds(compiled(layer, x, g)) if native.library() else ""
        for count in TOGETHER:

            def by(
                way: Callable[[nn.Conv2d, Tensor, Tensor], Tensor], count: int = count
            ) -> list[Tensor]:
                return [
                    way(layer, *part) for part in zip(x.split(count), g.split(count), strict=True)
                ]

            found[f"groups of {count}"] = milliseconds(
                lambda by=by: by(convolution.grouped_weight_gradient)
            )  # type: ignore[misc]
            slid = layer.in_channels == 1
            found[f"slid, {count}"] = (
                milliseconds(lambda by=by: by(convolution.correlations)) if slid else ""
            )  # type: ignore[misc]
        found["patches"] = milliseconds(
            lambda: convolution.formed_by_patches(layer, x, g, everything, len(x))
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (layer, shape) in LAYERS.items():
        rows.append({"layer": name, **measure(layer, shape)})
        print(rows[-1], flush=True)
    save_csv(rows, asked.out / "convolutions.csv")


if __name__ == "__main__":
    main()
