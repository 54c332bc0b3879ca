"""torch.compile of an attached model, and the accelerators' form of convolutions inside the
engine.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.torch_internals import never_compiled

ROWS = 8


@pytest.mark.filterwarnings("ignore")  # torch's own, while tracing
def test_a_model_compiled_after_attaching_gives_the_eager_sums() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(ROWS, 7), torch.randint(0, 3, (ROWS,))
    engine = Engine(model, Clipping(0.1), capacity=ROWS)
    engine.attach()
    found = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        engine.begin_microbatch(ROWS)
        F.cross_entropy(run(x), y).backward()
        found.append([s.clone() for s in engine.split(engine.take())])
    engine.detach()
    for eager, compiled in zip(*found, strict=True):
        assert float(eager.abs().max()) > 0
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-9)


def test_a_compiled_model_is_refused_with_the_fix() -> None:
    compiled = torch.compile(nn.Linear(5, 3), backend="eager")
    with pytest.raises(PrivacyError, match="attach the module inside the wrapper"):
        Engine(compiled, Clipping(1.0), capacity=ROWS).attach()


def test_what_is_never_compiled_is_not_nor_is_what_it_calls() -> None:
    """In a function that is compiled, by itself, and called for the first time or again."""
    compiling: list[bool] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    @never_compiled
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    def called(x: torch.Tensor) -> torch.Tensor:
        return outer(x.sin()).cos()

    x = torch.ones(2)
    for _ in range(2):
        torch.testing.assert_close(torch.compile(called, backend=backend)(x), called(x))
        torch.testing.assert_close(torch.compile(outer, backend=backend)(x), outer(x))
    names = {name for graph in graphs for name in graph}
    assert {"sin", "cos"} <= names, "the rest is compiled"
    assert not any("add" in name or "mul" in name for name in names)
    assert compiling == [False] * 8
