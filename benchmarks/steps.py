"""Steps that benchmarks take: plain PyTorch's, ours, and the peers', each with a model and a batch
of its own.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

import dpoptim
from dpoptim.clipping import Clipping
from dpoptim.gradients.arithmetic import multiplication
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.graphed_pass import GraphedPass
from dpoptim.gradients.per_sample import native
from dpoptim.noise.few_rows import memory_of
from dpoptim.noise.gaussian import add_normal
from dpoptim.noise.stream import KeyStream
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.training.trials.isolation import choose_isolation
from dpoptim.training.trials.probe import positions_per_layer
from workloads import Workload

Step = Callable[[], None]
RATE = 1e-4
BATCHES = 60  # that the records of a whole loop make
MANY_STEPS = 100_000  # of a loop that is left before they are done


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)


def made(work: Workload, device: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Model and batch."""
    with torch.device(device):
        model = work.build()
    x, y = work.data()
    return model, x.to(device), y.to(device)


def plain(
    work: Workload,
    *,
    compiled: bool = False,
    device: str = "cpu",
    narrow: torch.dtype | None = None,
) -> Step:
    """``narrow``: what torch.autocast computes in, if it does."""
    model, x, y = made(work, device)
    optimizer = sgd(model)
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast(device, narrow) if narrow else nullcontext():
            loss = work.loss(forward(x), y, "mean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # nothing of a step is held while others take their turns

    return step


def by_mkl(step: Step) -> Step:
    """The same with the library that plain PyTorch multiplies with, and where that leaves half of
    the vectors unused, with no wider ones in compiled products.
    """
    level = 1 if multiplication.onednn_is_faster() else native.MOST_OF_PRODUCTS

    def slower() -> None:
        with (
            patch.object(multiplication, "onednn_is_faster", lambda: False),
            patch.object(multiplication, "compiles_thin_rows", lambda: False),
            patch.object(native, "MOST_OF_PRODUCTS", level),
        ):
            step()

    return slower


def ours(
    work: Workload,
    *,
    noise: bool = False,
    compiled: bool = False,
    graphed: bool = False,
    device: str = "cpu",
    narrow: torch.dtype | None = None,
) -> Step:
    """``graphed``: by a CUDA graph, on an accelerator. ``narrow``: as for `plain`."""
    model, x, y = made(work, device)
    optimizer, stream = sgd(model), KeyStream()
    chosen = choose_isolation(model, TensorDataset(x, y))
    positions = positions_per_layer(model, chosen.sample)
    engine = Engine(
        model,
        Clipping(1.0),
        capacity=len(x),
        reduction="sum",
        positions=positions,
        isolation=chosen.isolation,
    )
    engine.attach()
    forward = torch.compile(model) if compiled else model

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, narrow) if narrow else nullcontext():
            return work.loss(forward(x), y, "none")

    def usual(x: torch.Tensor, y: torch.Tensor) -> None:
        engine.backward(losses(x, y))  # as `private.backward` does, after a look at the losses

    both_ways = GraphedPass(engine, losses, engine.backward, engine.backward) if graphed else usual

    def step() -> None:
        engine.begin_microbatch(len(x))
        both_ways(x, y)
        sums = engine.take_by_parameter()
        add_normal(stream, sums, 1.0 if noise else 0.0)
        engine.write_means(memory_of(sums), len(x))
        optimizer.step()
        optimizer.zero_grad()

    return step


def closed_form(work: Workload) -> Step:
    """Softmax regression as the estimators train it, without autograd; the norms of the records
    are measured once.
    """
    model, (x, y) = work.build(), work.data()
    layers = [
        module
        for module in model.modules()
        if not list(module.children()) and not isinstance(module, nn.Flatten)
    ]
    if len(layers) != 1 or not isinstance(layers[0], nn.Linear):
        raise TypeError("for generalised linear models")
    layer, x = layers[0], x.flatten(1)
    regression = LinearModel(
        "softmax", layer.in_features, layer.out_features, intercept=layer.bias is not None
    )
    w = torch.zeros(regression.dimension, dtype=torch.float64)
    norms = regression.squared_row_norms(x)

    def step() -> None:
        total = regression.clipped_sum(
            x, y, [(1.0, w)], 1.0, capacity=len(x), squared_row_norms=norms
        )
        w.sub_(total, alpha=RATE / len(x))

    return step


def vmapped(work: Workload) -> Step:
    """torch.func: every gradient formed, clipped and summed; no noise."""
    if work.huge_table:
        raise MemoryError("per-record gradients of the table")
    model, (x, y) = work.build(), work.data()
    optimizer = sgd(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def loss(given: dict[str, torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return work.loss(functional_call(model, given, (a[None],)), b[None], "mean")

    per_record = vmap(grad(loss), (None, 0, 0))

    def step() -> None:
        gradients = per_record({name: p.detach() for name, p in parameters.items()}, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        factors = (1 / norms).clamp(max=1) / len(x)
        for name, p in parameters.items():
            p.grad = torch.einsum("b,b...->...", factors, gradients[name])
        optimizer.step()

    return step


def opacus(
    work: Workload, *, ghost: bool, device: str = "cpu", narrow: torch.dtype | None = None
) -> Step:
    """Opacus with hooks, or ghost clipping; with its float32 noise. ``narrow``: as for `plain`."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    from opacus.validators import ModuleValidator

    if work.huge_table and not ghost:
        raise MemoryError("per-record gradients of the table")
    with torch.device(device):
        model = ModuleValidator.fix((work.looked_up or work.build)())
    x, y = (part.to(device) for part in work.data())
    common = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": len(x)}
    if not ghost:
        wrapped: nn.Module = GradSampleModule(model)
        optimizer = DPOptimizer(sgd(model), **common)

        def step() -> None:
            with torch.autocast(device, narrow) if narrow else nullcontext():
                loss = work.loss(wrapped(x), y, "mean")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step
    fast = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0)
    optimizer = DPOptimizerFastGradientClipping(sgd(model), **common)

    class Criterion:
        reduction = "mean"

        def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return work.loss(output, target, self.reduction)

    criterion = DPLossFastGradientClipping(fast, optimizer, Criterion())

    def ghost_step() -> None:
        with torch.autocast(device, narrow) if narrow else nullcontext():
            loss = criterion(fast(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return ghost_step


def records(work: Workload) -> TensorDataset:
    """What a whole loop trains on."""
    x, y = work.data()
    return TensorDataset(*(t.repeat(BATCHES, *[1] * (t.dim() - 1)) for t in (x, y)))


def plain_loop(work: Workload) -> Step:
    """A step of a plain loop over a DataLoader: load, forward, backward, update."""
    model, data = work.build(), records(work)
    optimizer = sgd(model)
    loader = DataLoader(data, batch_size=len(data) // BATCHES, shuffle=True)
    batches: Iterator[list[torch.Tensor]] = itertools.chain.from_iterable(itertools.repeat(loader))

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        work.loss(model(x), y, "mean").backward()
        optimizer.step()

    return step


class PrivateLoop:
    """A step of a whole private loop: coins, loading, forward, backward, clipping, noise, update.

    Attributes:
        share: of the expected batch that the last one had; Poisson batches vary, and a step's time
            with them.
    """

    def __init__(self, work: Workload) -> None:
        data = records(work)
        self._size, self._loss = len(data) // BATCHES, work.loss
        self._model = work.build()
        self._optimizer = sgd(self._model)
        plan = dpoptim.DPSGD(clip_norm=1.0).plan(
            n=len(data),
            batch_size=self._size,
            steps=MANY_STEPS,
            noise_multiplier=1.0,
            delta=1e-5,
        )
        self._open = ExitStack()
        self._private = self._open.enter_context(
            dpoptim.attach(plan, self._model, self._optimizer, data, ledger=dpoptim.Ledger())
        )
        self._batches = iter(self._private.batches())
        self.share = 1.0

    def __call__(self) -> None:
        x, y = next(self._batches)
        self._private.backward(self._loss(self._model(x), y, "none"))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.share = len(x) / self._size

    def close(self) -> None:
        self._open.close()
