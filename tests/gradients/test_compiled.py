"""torch.compile of an attached model, and the accelerators' form of convolutions inside the
engine.
"""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.hooks.forwards import WithGradients
from dpoptim.gradients.layers import linear
from dpoptim.runtime.torch_internals import never_compiled

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


class GELU(nn.Module):
    """Two layers with an activation written out: what a compiler may fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(7, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.into(x)
        return self.out(0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * h * h * h))))


def engine_of(model: nn.Module) -> Engine:
    engine = Engine(model, Clipping(0.1), capacity=ROWS)
    engine.attach()
    return engine


def clipped_sum(engine: Engine, run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    engine.begin_microbatch(len(x))
    run(x).square().sum().backward()
    return torch.cat(engine.take())


@pytest.fixture
def compiled_anew() -> Iterator[list[str]]:
    """Graphs that the compiler was asked for, by what begins them; of a compiler that forgets."""
    torch.compiler.reset()
    graphs: list[str] = []
    yield graphs
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")  # torch's own, while tracing
def test_steps_and_engines_share_what_was_compiled_once(compiled_anew: list[str]) -> None:
    """One graph between two layers; another when the number of rows changes first, which then
    serves all numbers. Three engines live at once, after one that has ended.
    """
    torch.manual_seed(0)

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        names = [str(node.target) for node in graph.graph.nodes if node.op != "placeholder"]
        compiled_anew.append(names[0])
        return graph

    ended = engine_of(model := GELU())
    clipped_sum(ended, torch.compile(model, backend=backend), torch.randn(ROWS, 7))
    ended.detach()
    models = [GELU() for _ in range(3)]
    engines = [engine_of(each) for each in models]
    runs = [torch.compile(each, backend=backend) for each in models]
    for rows, graphs in ((ROWS, 1), (ROWS, 1), (ROWS - 1, 2), (ROWS - 3, 2), (ROWS - 2, 2)):
        for engine, model, run in zip(engines, models, runs, strict=True):
            x = torch.randn(rows, 7)
            compiled, eager = (clipped_sum(engine, each, x) for each in (run, model))
            torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-9)
        assert len(compiled_anew) == graphs
    for engine in engines:
        engine.detach()


@pytest.mark.filterwarnings("ignore")  # torch's own, while tracing
def test_nothing_is_compiled_again_for_another_layer_or_engine(compiled_anew: list[str]) -> None:
    once = torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
    with once:
        for _ in range(3):
            engine = engine_of(model := GELU())
            run, x = torch.compile(model, backend="eager"), torch.randn(ROWS, 7)
            for _ in range(2):
                assert float(clipped_sum(engine, run, x).norm()) > 0
            engine.detach()


@pytest.mark.variants
@pytest.mark.filterwarnings("ignore")  # torch's own, while tracing
def test_evaluations_between_steps_are_one_graph(compiled_anew: list[str]) -> None:
    """Another one for training mode and for the first other number of rows; none of our own code.
    Steps in between are recorded as before, with the one graph that they have of their own.
    """
    torch.manual_seed(2)

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        compiled_anew.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return graph

    engine = engine_of(model := GELU())
    evaluated = torch.compile(model, backend=backend, fullgraph=True)
    trained = torch.compile(model, backend=backend)
    x = torch.randn(ROWS, 7)
    for rows, graphs in ((ROWS, 2), (ROWS, 2), (ROWS - 1, 4), (ROWS - 2, 4)):
        with torch.no_grad():
            torch.testing.assert_close(evaluated(x[:rows]), model(x[:rows]))
        compiled, eager = (clipped_sum(engine, each, x[:rows]) for each in (trained, model))
        assert float(eager.norm()) > 0
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-9)
        assert len(compiled_anew) == graphs
    engine.detach()
    assert all("tanh" in graph for graph in compiled_anew), "the model's code alone"
    assert ["linear" in graph for graph in compiled_anew] == [True, False] * 2


class Mixed(GELU):
    """A layer that is used with gradients and without, in one forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.into(x).cos()
        return self.out(self.into(x) * target)


class Frozen(GELU):
    """Its first layer does not train: it has a forward pass without hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.into.requires_grad_(False)


@pytest.mark.filterwarnings("ignore")  # torch's own, while tracing
@pytest.mark.parametrize("kind", [Mixed, Frozen])
def test_what_runs_without_gradients_is_compiled_and_the_rest_recorded(
    kind: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, compiled_anew: list[str]
) -> None:
    monkeypatch.setattr(linear, "rows_leave_mkl", lambda *_: True)
    torch.manual_seed(3)
    engine = engine_of(model := kind())
    run, x = torch.compile(model, backend="aot_eager"), torch.randn(ROWS, 7)
    for _ in range(2):
        compiled, eager = (clipped_sum(engine, each, x) for each in (run, model))
        assert float(eager.norm()) > 0
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-9)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x))
    engine.detach()


@pytest.mark.filterwarnings("ignore")  # torch's own, while tracing
def test_layers_that_a_compiler_took_with_their_gradients_are_refused(
    monkeypatch: pytest.MonkeyPatch, compiled_anew: list[str]
) -> None:
    def without_hooks(forward: WithGradients, *args: object) -> object:
        return forward._original(*args)

    monkeypatch.setattr(WithGradients, "__call__", without_hooks)
    engine = engine_of(model := GELU())
    with pytest.raises(PrivacyError, match="outside its module's forward pass"):
        clipped_sum(engine, torch.compile(model, backend="aot_eager"), torch.randn(ROWS, 7))
    assert not torch.cat(engine.take()).any()
    engine.detach()


class Writes(GELU):
    """Carries what it sees out in a parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.into.bias.add_(x.mean(0)[:6])
        return super().forward(x)


@pytest.mark.filterwarnings("ignore")  # torch's own, while tracing
def test_a_compiled_evaluation_may_not_write_into_parameters(compiled_anew: list[str]) -> None:
    engine = engine_of(model := Writes())
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(PrivacyError, match="was changed"):
            run(torch.randn(ROWS, 7))
    engine.detach()


@pytest.mark.filterwarnings("ignore")  # torch's own, while tracing
def test_one_record_moves_a_compiled_models_sum_by_the_clip_norm_at_most() -> None:
    torch.manual_seed(1)
    engine = engine_of(model := GELU())
    run = torch.compile(model, backend="aot_eager")
    x = torch.randn(ROWS, 7) * torch.logspace(-3, 6, ROWS)[:, None]
    whole = clipped_sum(engine, run, x)
    moved = [
        float((whole - clipped_sum(engine, run, torch.cat([x[:i], x[i + 1 :]]))).norm())
        for i in range(ROWS)
    ]
    engine.detach()
    assert max(moved) <= 0.1
    assert max(moved) > 0.09, "the largest are clipped"


@pytest.mark.filterwarnings("ignore")  # torch's own, while tracing
def test_a_model_under_hooks_is_not_one_graph(compiled_anew: list[str]) -> None:
    """Asked for in one graph, it is refused by the compiler, and nothing was added up."""
    engine = engine_of(model := GELU())
    engine.begin_microbatch(ROWS)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(ROWS, 7))
    assert not torch.cat(engine.take()).any()
    engine.detach()


def test_a_compiled_model_is_refused_with_the_fix() -> None:
    compiled = torch.compile(nn.Linear(5, 3), backend="eager")
    with pytest.raises(PrivacyError, match="compile it in place"):
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


def test_what_is_never_compiled_alone_is_compiled_with_what_calls_it() -> None:
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_method"])
        return graph

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.tan()

    @partial(never_compiled, alone=True)
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x).exp()

    def called(x: torch.Tensor) -> torch.Tensor:
        return outer(x.sin()).cos()

    x = torch.ones(2)
    for function, expected in (
        (called, [["sin", "tan", "exp", "cos"]]),
        (outer, [["tan"]]),  # what it calls, by itself
    ):
        torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x))
        assert graphs == expected
        graphs.clear()
