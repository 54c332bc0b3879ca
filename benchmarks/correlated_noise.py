"""What correlated noise costs a step: processor time and memory, for models of a million and more
parameters.

    python benchmarks/correlated_noise.py [--parameters 1000000] [--steps 128] [--json FILE]

Times are processor seconds of one thread, and also a multiple of what independent noise costs,
which every mechanism draws at least. Memory is what a mechanism remembers from step to step
(float64), at its largest.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch

from dpoptim.noise import KeyStream
from dpoptim.noise.correlated import (
    BinaryTree,
    BufferedToeplitz,
    Independent,
    RedrawnToeplitz,
    Strategy,
    ToeplitzSquareRoot,
)

MECHANISMS: dict[str, Strategy] = {
    "independent": Independent(),
    "binary tree": BinaryTree(),
    "tree, Honaker": BinaryTree("honaker"),
    "buffered Toeplitz, 3": BufferedToeplitz(3),
    "buffered Toeplitz, 4": BufferedToeplitz(4),
    "redrawn Toeplitz": RedrawnToeplitz(),
    "Toeplitz square root": ToeplitzSquareRoot(),
    "normalised": ToeplitzSquareRoot(normalised=True),
}


def measure(mechanism: Strategy, parameters: int, steps: int) -> dict[str, float]:
    """Mean processor seconds of a step, and the most bytes remembered."""
    state = mechanism.start(steps, [parameters], KeyStream())
    total = torch.zeros(parameters, dtype=torch.float64)
    state.add([total], 1.0)  # the first step makes buffers
    most, began = 0, time.process_time()
    for _ in range(steps - 1):
        state.add([total], 1.0)
        most = max(most, sum(len(vectors) for vectors in state._vectors))
    return {
        "seconds": (time.process_time() - began) / (steps - 1),
        "bytes": 8.0 * most * parameters,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--only", nargs="*", default=list(MECHANISMS), help="names of mechanisms")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        name: measure(MECHANISMS[name], options.parameters, options.steps) for name in options.only
    }
    base = results.get("independent", {"seconds": math.nan})["seconds"]
    print(f"{options.parameters:,} parameters, {options.steps} steps")
    print(f"{'mechanism':<22}{'s/step':>9}{'x indep.':>10}{'MB kept':>10}{'largest error':>15}")
    for name, found in results.items():
        error = float(MECHANISMS[name].prefix_std(options.steps).max())
        seconds, kept = found["seconds"], found["bytes"] / 1e6
        print(f"{name:<22}{seconds:>9.4f}{seconds / base:>10.2f}{kept:>10.0f}{error:>15.3f}")
    if options.json:
        options.json.write_text(
            json.dumps(
                {"parameters": options.parameters, "steps": options.steps, **results}, indent=2
            )
        )


if __name__ == "__main__":
    main()
