"""Models that live on another device than the CPU: the same sums, the same runs, and no tensor
left behind on the CPU.

Run by `test_second_device.py`, on a GPU where there is one. No accelerator is needed: `pretend.cpp`
makes a device of the CPU's memory. PyTorch refuses operations that mix it with CPU tensors, as it
does with CUDA's, so a tensor made on the wrong device fails here as it would there. The kernels
are the CPU's: what a real accelerator rounds otherwise, and how fast it is, is not seen then.
"""

import copy
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.base import BaseEstimator
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import dpoptim
from devices import pretend
from dpoptim.clipping import Clipping
from dpoptim.estimators import (
    DPLinearRegression,
    DPLogisticRegression,
    DPSGDClassifier,
    DPSGDRegressor,
)
from dpoptim.gradients.arithmetic.precision import multiplies_narrow
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.graphed_pass import GraphedPass
from dpoptim.gradients.oracle import engine_sums
from dpoptim.noise import KeyStream, add_normal, on_device
from dpoptim.noise.few_rows import FewRows, memory_of
from dpoptim.noise.gaussian import LEAST_ON_DEVICE
from dpoptim.noise.on_device_reference import draws
from dpoptim.solvers import Budget, LinearProblem, ModuleProblem, Objective, noisy_gd
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.training import refusals
from drawn_by_reference import launch, launched_by
from support import CASES, Case, by_engine, joint_norm, record_loss

ROWS, N, FEATURES, CLASSES = 9, 60, 4, 3
# the pretended device has no kernel for PyTorch's own
FUSED = ("lstm", "lstm-time-major", "gru-both-ways")


@pytest.fixture(scope="session")
def device() -> torch.device:
    where = os.environ["SECOND_DEVICE"]
    if where != "cuda":
        return pretend.register(Path(where))
    torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.rnn.fp32_precision = "ieee"
    return torch.device("cuda:0")


def test_it_is_a_device_of_its_own(device: torch.device) -> None:
    there = torch.ones(3, device=device)
    for mixed in (
        lambda: there + torch.ones(3),
        lambda: there @ torch.ones(3),
        lambda: torch.cat([there, torch.ones(3)]),
    ):
        with pytest.raises(RuntimeError, match="same device|CPU tensor"):
            mixed()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()


def moved(model: nn.Module, device: torch.device | str) -> nn.Module:
    """``model.to(device)``, which on a device that is not PyTorch's own would untie tied
    weights.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize(
    ("style", "dtype"), [("flat", torch.float32), ("automatic", torch.float64)]
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.thinned(2)
def test_sums_are_those_of_the_cpu(
    case: Case, style: str, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    model = case.build().to(dtype)
    x, target = case.inputs(ROWS, dtype)
    clipping = Clipping(0.5, style)
    expected = by_engine(copy.deepcopy(model), x, target, clipping, capacity=ROWS)
    sums = by_engine(
        moved(model, device),
        x.to(device),
        target.to(device),
        clipping,
        capacity=ROWS,
        microbatches=2,
    )
    assert {total.device.type for total in sums} == {device.type}
    differences = [a.cpu() - b for a, b in zip(sums, expected, strict=True)]
    assert joint_norm(differences) < (1e-5 if dtype == torch.float32 else 1e-12) * joint_norm(
        expected
    )


@pytest.mark.parametrize("length", [1, 6])
def test_large_layers_give_the_sums_of_the_cpu(length: int, device: torch.device) -> None:
    """Their norms are claimed from Gram matrices there, and record by record on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 300), nn.Tanh(), nn.Linear(300, 200))
    x, target = torch.randn(20, length, 128), torch.randn(20)
    expected = by_engine(copy.deepcopy(model), x, target, Clipping(0.5), capacity=100)
    sums = by_engine(model.to(device), x.to(device), target.to(device), Clipping(0.5), capacity=100)
    assert joint_norm(
        [a.cpu() - b for a, b in zip(sums, expected, strict=True)]
    ) < 1e-4 * joint_norm(expected)


class Split(nn.Module):
    """The first layers here, the last ones there, as a model too large for one device."""

    def __init__(self, there: torch.device | str) -> None:
        super().__init__()
        self.there = there
        self.first, self.last = nn.Linear(FEATURES, 6), nn.Linear(6, 5).to(there)
        self.scale, self.head = nn.Parameter(torch.rand(6)), nn.Linear(5, CLASSES).to(there)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x) * self.scale)
        return self.head(torch.tanh(self.last(h.to(self.there)))).cpu()


@pytest.mark.parametrize("style", ["flat", "automatic", "per-layer"])
def test_a_model_on_two_devices(style: str, device: torch.device) -> None:
    x, target = torch.randn(ROWS, 3, FEATURES), torch.randn(ROWS)
    found = []
    for where in (device, "cpu"):
        torch.manual_seed(0)
        sums = by_engine(
            Split(where), x, target, Clipping(0.5, style), capacity=ROWS, microbatches=3
        )
        found.append([total.cpu() for total in sums])
    assert joint_norm([a - b for a, b in zip(*found, strict=True)]) < 1e-5 * joint_norm(found[1])


def test_check_on_two_devices(device: torch.device) -> None:
    torch.manual_seed(0)
    model, x, y = Split(device), torch.randn(5, FEATURES), torch.randint(0, CLASSES, (5,))
    found = dpoptim.check(
        model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (x, y)
    )
    assert found.loss_reduction == "mean"
    lengths = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])

    def weighted(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (losses * batch[2]).sum() / batch[2].sum()

    with pytest.raises(dpoptim.SamplesInteractError, match="weighted mean"):
        dpoptim.check(model, weighted, (x, y, lengths))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in FUSED], ids=lambda case: case.name
)
def test_check_passes(case: Case, device: torch.device) -> None:
    torch.manual_seed(0)
    model = moved(case.build().double(), device)
    batch = tuple(part.to(device) for part in case.inputs(5, torch.float64))
    found = dpoptim.check(
        model, lambda model, batch: record_loss(model(batch[0]), batch[1]).mean(), batch
    )
    assert found.loss_reduction == "mean"


@pytest.mark.variants
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_language_model_of_hugging_face(device: torch.device) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = transformers.LlamaConfig(
        vocab_size=29, num_key_value_heads=1, max_position_embeddings=8, **sizes
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    ids = torch.randint(0, 29, (5, 6))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1).mean()

    expected = engine_sums(copy.deepcopy(model), loss, ids, 5, Clipping(0.5), "mean")
    sums = engine_sums(moved(model, device), loss, ids.to(device), 5, Clipping(0.5), "mean")
    assert joint_norm(
        [a.cpu() - b for a, b in zip(sums, expected, strict=True)]
    ) < 1e-6 * joint_norm(expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_device_is_asked_what_it_can_multiply(dtype: torch.dtype, device: torch.device) -> None:
    """The pretended one has no products of narrow matrices with float32 results."""
    assert multiplies_narrow(device, dtype) == (device.type == "cuda")
    assert not multiplies_narrow(torch.device("cpu"), dtype)


METHODS = {
    "flat": dpoptim.DPSGD(clip_norm=1.0),
    "automatic": dpoptim.DPSGD(clip_norm=1.0, clipping="automatic"),
    "per-layer": dpoptim.DPSGD(clip_norm=1.0, clipping="per-layer"),
    "quantile-at-the-start": dpoptim.DPSGD(clip_norm=dpoptim.PrivateQuantile(0.5, share=0.3)),
    "quantile-all-along": dpoptim.DPSGD(
        clip_norm=dpoptim.PrivateQuantile(0.5, share=0.3, when="all along")
    ),
    "values": dpoptim.ValueClippedSGD(clip_norm=1.0),
    "error-feedback": dpoptim.DiceSGD(clip_norm=1.0),
    "correlated-noise": dpoptim.DPFTRL(clip_norm=1.0),
}
HALF = [pytest.param(m, marks=[pytest.mark.variants] * (k % 2)) for k, m in enumerate(METHODS)]


def problem(device: torch.device | str) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    with torch.device("cpu"):  # whose random numbers they are
        model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
        x = torch.randn(N, FEATURES, dtype=torch.float64)
        columns = torch.randn(FEATURES, CLASSES).double()
    model.to(device)
    return model, TensorDataset(x.to(device), (x @ columns).argmax(1).to(device))


def train(
    method: Any, device: torch.device | str, folder: Path, stop: int | None = None, **options: Any
) -> nn.Module:
    """Six steps with a fixed noise seed; saved and ended after ``stop`` of them."""
    model, data = problem(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    plan = method.plan(n=N, batch_size=30, steps=6, noise_multiplier=0.5, delta=1e-5)
    with dpoptim.attach(plan, model, optimizer, data, noise_seed=1, **options) as private:
        for x, y in private.batches(physical_batch_size=16):
            if isinstance(method, dpoptim.ValueClippedSGD):
                private.backward(F.cross_entropy(model(x), y, reduction="none"))
            else:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if private.finished_step and private.steps_done == stop:
                private.save(folder / "checkpoint")
                break
    return model


@pytest.fixture
def by_default(device: torch.device) -> Iterator[None]:
    """Whatever says nothing of a device is made on this one, as after
    ``torch.set_default_device("cuda")``.
    """
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


@cache
def on_the_cpu(method: str) -> Tensor:
    """The weights of a whole run, which saves nothing."""
    return parameters(train(METHODS[method], "cpu", Path()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("method", METHODS)
def test_runs_are_those_of_the_cpu(method: str, device: torch.device, tmp_path: Path) -> None:
    there, here = parameters(train(METHODS[method], device, tmp_path)), on_the_cpu(method)
    assert not torch.equal(here, parameters(problem("cpu")[0]))
    torch.testing.assert_close(there, here)


@pytest.mark.set_aside("flat", "quantile-all-along")
@pytest.mark.parametrize("method", HALF)
def test_a_run_goes_on_here_and_elsewhere(
    method: str, device: torch.device, tmp_path: Path
) -> None:
    """Saved on one device, taken up on the same one and on another."""
    places: list[torch.device | str] = [device, "cpu"]
    resume, found = tmp_path / "checkpoint", []
    for where, later in zip(places, (places, places[:1]), strict=True):
        train(METHODS[method], where, tmp_path, stop=3)
        for place in later:
            model = train(METHODS[method], place, tmp_path, resume=resume)
            assert {p.device.type for p in model.parameters()} == {torch.device(place).type}
            found.append(parameters(model))
    assert bool(found[0].isfinite().all())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


# which is for chains of layers
@pytest.mark.parametrize("method", [each for each in HALF if each.values != ("values",)])
def test_a_model_on_two_devices_is_trained(
    method: str, device: torch.device, tmp_path: Path
) -> None:
    """And goes on from a checkpoint."""
    _, data = problem("cpu")
    data = TensorDataset(data.tensors[0].float(), data.tensors[1])
    plan = METHODS[method].plan(n=N, batch_size=30, steps=6, noise_multiplier=0.5, delta=1e-5)
    path, resume = tmp_path / "checkpoint", None
    for stop in (3, 6):
        torch.manual_seed(0)
        model = Split(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with dpoptim.attach(plan, model, optimizer, data, resume=resume) as private:
            before = [p.detach().cpu().clone() for p in model.parameters()]
            for x, y in private.batches():
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if private.steps_done == stop:
                    private.save(path)
                    break
            assert private.steps_done == stop
        resume = path
        assert all(
            not torch.equal(p.detach().cpu(), old)
            for p, old in zip(model.parameters(), before, strict=True)
        )


def spread_by_hooks(model: nn.Module, device: torch.device) -> None:
    """Put the last layer there, and Accelerate's hooks around all, as its ``device_map`` does."""
    hooks = pytest.importorskip("accelerate.hooks")
    moving = hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True)
    hooks.add_hook_to_module(model, moving)
    layers = list(model.children())
    layers[-1].to(device)
    for layer in layers:
        place = device if layer is layers[-1] else "cpu"
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(execution_device=place))


def test_a_model_that_is_spread_by_hooks_is_trained(device: torch.device) -> None:
    _, data = problem("cpu")
    data = TensorDataset(data.tensors[0].float(), data.tensors[1])
    plan = METHODS["flat"].plan(n=N, batch_size=30, steps=3, noise_multiplier=0.0, delta=1e-5)
    found = []
    for spread in (True, False):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))
        if spread:
            spread_by_hooks(model, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dpoptim.attach(plan, model, optimizer, data, noise_seed=3) as private:
            for x, y in private.batches():
                private.backward(F.cross_entropy(model(x), y, reduction="none"))
                optimizer.step()
                optimizer.zero_grad()
        found.append(parameters(model))
    torch.testing.assert_close(*found)


@pytest.mark.set_aside("flat", "error-feedback")
@pytest.mark.parametrize("method", HALF)
@pytest.mark.usefixtures("by_default")
def test_a_default_device_changes_nothing(
    method: str, device: torch.device, tmp_path: Path
) -> None:
    model = train(METHODS[method], device, tmp_path)
    torch.set_default_device(None)
    torch.testing.assert_close(parameters(model), on_the_cpu(method))


def test_batches_moved_in_the_loop(device: torch.device) -> None:
    """Data on the CPU, as a loader gives them."""
    model, _ = problem(device)
    _, data = problem("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = parameters(model)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=30, steps=2, noise_multiplier=0.5, delta=1e-5
    )
    with dpoptim.attach(plan, model, optimizer, data) as private:
        for x, y in private.batches(num_workers=1):
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
    assert not torch.equal(parameters(model), before)


def test_how_many_rows_fit(device: torch.device) -> None:
    model, data = problem(device)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=30, steps=2, noise_multiplier=0.5, delta=1e-5
    )

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    rows = dpoptim.physical_batch_size(plan, model, loss, data[:4], max_memory=100_000)
    assert rows > 4


@pytest.mark.parametrize("kind", ["linear", "module"])
def test_solvers_find_what_they_find_on_the_cpu(kind: str, device: torch.device) -> None:
    found = []
    for where in (device, "cpu"):
        model, data = problem(where)
        x, y = data.tensors
        if kind == "linear":
            question = LinearProblem(LinearModel("logistic", features=FEATURES), capacity=N)
            y = (y > 0).long()
        else:
            question = ModuleProblem(
                model, lambda output, y: F.cross_entropy(output, y, reduction="none"), capacity=N
            )
        objective = Objective(question, (x, y))
        budget = Budget(epsilon=4, delta=1e-5)
        found.append(
            noisy_gd(
                objective, None, budget, lipschitz=1.0, steps=5, step_size=0.5, noise_seed=1
            ).weights
        )
    torch.testing.assert_close(*found)


def test_quantiles_of_values_that_lie_there(device: torch.device) -> None:
    values = torch.linspace(0.1, 100, 2000)
    settings = {"epsilon": 2.0, "low": 1e-3, "high": 1e3, "noise_seed": 3}
    here, there = (
        dpoptim.private_low_quantile(v, 0.1, **settings)[0] for v in (values, values.to(device))
    )
    assert here == there


@pytest.mark.parametrize(
    "kind", [DPLogisticRegression, DPLinearRegression, DPSGDClassifier, DPSGDRegressor]
)
def test_estimators_stay_on_the_cpu(kind: type[BaseEstimator], device: torch.device) -> None:
    """Their tables are NumPy's, whatever the default device is."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(300, FEATURES))
    y = (x[:, 0] > 0).astype(float)
    predictions = []
    for default in (device, None):
        torch.set_default_device(default)
        try:
            options = (
                {"random_state": 0, "epochs": 2}
                if kind in (DPSGDClassifier, DPSGDRegressor)
                else {"steps": 5}
            )
            if kind in (DPLinearRegression, DPSGDRegressor):
                options["target_bound"] = 1.0
            fitted = kind(epsilon=4.0, delta=1e-5, noise_seed=0, **options).fit(x, y)
            predictions.append(fitted.predict(x))
        finally:
            torch.set_default_device(None)
    np.testing.assert_allclose(*predictions)


@pytest.fixture
def kernels(device: torch.device) -> on_device.Launch:
    """What starts a GPU's own; the pretended device has the library's reference in their place,
    which cannot reach a GPU's memory.
    """
    if device.type != "cuda":
        return launch
    pytest.importorskip("triton")
    own = on_device.launch_on(device)
    assert own is not None
    return own


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_large_tensors_is_drawn_there(
    dtype: torch.dtype, default: bool, device: torch.device, kernels: on_device.Launch
) -> None:
    """Where there are kernels; small tensors get the draws of the CPU's own noise, and so do large
    ones where there are none.
    """
    large = LEAST_ON_DEVICE + 5

    def drawn(size: int, launch: on_device.Launch | None) -> Tensor:
        out = torch.ones(size, dtype=dtype, device=device)
        with launched_by(launch):
            add_normal(KeyStream.from_seed(1, "noise"), out, 3.0)
        return out.cpu()

    torch.set_default_device(device if default else None)
    try:
        found = drawn(1000, kernels), drawn(large, None)
        there = drawn(large, kernels)
    finally:
        torch.set_default_device(None)
    for out in found:
        expected = torch.ones(len(out), dtype=torch.float64)
        add_normal(KeyStream.from_seed(1, "noise"), expected, 3.0)
        assert torch.equal(out, expected.to(dtype))
    secret = bytearray(32)
    KeyStream.from_seed(1, "noise").branch().fill(secret)
    by_kernels = torch.from_numpy(1.0 + 3.0 * draws(bytes(secret), [large]))
    assert torch.equal(there, by_kernels.to(dtype))


@pytest.fixture
def wrong_in_float64(kernels: on_device.Launch) -> Iterator[None]:
    """The device draws, but adds something else to tensors of that dtype."""

    def wrong(
        regions: Tensor,
        tables: Tensor,
        dtype: torch.dtype,
        key: Sequence[int],
        std: Sequence[int],
    ) -> None:
        off = int(dtype == torch.float64)
        kernels(regions, tables, dtype, key, (std[0], std[1] + off))

    with launched_by(wrong):
        yield


@pytest.mark.usefixtures("wrong_in_float64")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_device_that_draws_wrongly_is_refused_before_anything_is_charged(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the parameters' own dtype does well: some of their sums are in float64."""
    monkeypatch.setattr(refusals, "LEAST_ON_DEVICE", 1)
    model, data = problem(device)
    data = TensorDataset(data.tensors[0].to(dtype), data.tensors[1])
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=30, steps=2, noise_multiplier=0.5, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.to(dtype).parameters(), lr=0.1)
    with dpoptim.Ledger() as ledger:
        with pytest.raises(RuntimeError, match=f"noise cannot be drawn on {device.type}"):
            dpoptim.attach(plan, model, optimizer, data, ledger=ledger)
        assert not list(ledger.entries())


@pytest.mark.usefixtures("wrong_in_float64")
def test_what_is_copied_to_float64_is_refused_where_that_goes_wrong(device: torch.device) -> None:
    """And what lies there in float32 is not."""
    add_normal(KeyStream(), torch.zeros(LEAST_ON_DEVICE, device=device), 1.0)
    narrow = torch.zeros(LEAST_ON_DEVICE, dtype=torch.bfloat16, device=device)
    row, value = torch.tensor([3]), torch.ones(1, 4, dtype=torch.float64)
    few = FewRows(torch.zeros(LEAST_ON_DEVICE, device=device), 0, row.to(device), value.to(device))
    for copied in (narrow, few):
        with pytest.raises(RuntimeError, match=f"noise cannot be drawn on {device.type}"):
            add_normal(KeyStream(), copied, 1.0)
        assert not memory_of([copied])[0].any()


class AloneOnTheDevice(TorchDispatchMode):
    """Refuses what a CUDA graph refuses: to wait for a device, and to read the host's memory."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2", "unique_dim")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {
            each.device.type
            for each in pytree.tree_leaves((args, kwargs, result))
            if isinstance(each, Tensor) and (each.dim() or not each.is_cpu)
        }
        name = func.overloadpacket.__name__
        if name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1]):
            name = "nonzero"
        if devices - {"cpu"} and (name in self.WAITS or len(devices) > 1):
            raise RuntimeError(f"{name} is not for a captured pass")
        return result


def test_a_host_that_is_asked_for_anything_is_noticed(device: torch.device) -> None:
    for asking in (
        lambda x: float(x.sum()),
        lambda x: x.cpu(),
        lambda x: torch.ones(3, device="cpu").to(x.device),
        lambda x: x[x > 0],
    ):
        with pytest.raises(RuntimeError, match="captured"), AloneOnTheDevice():
            asking(torch.ones(3, device=device))


@pytest.mark.parametrize("slots", [False, True])
def test_a_loop_s_captured_pass_asks_nothing_of_the_host(
    slots: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for CUDA's graphs; on a GPU by these, which refuse it themselves."""
    captures = 0

    def made(engine: Engine, *functions: Any, devices: list[str]) -> GraphedPass:
        def capture(work: Any) -> Any:
            nonlocal captures
            captures += 1
            with AloneOnTheDevice():
                found = work()
            return found, lambda: None

        if device.type == "cuda":
            return GraphedPass(engine, *functions)
        return GraphedPass(engine, *functions, capture=capture, devices=[device.type])

    monkeypatch.setattr("dpoptim.training.batch_loop.GraphedPass", made)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Linear(4, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(32, CLASSES),
    )  # fmt: skip
    model.to(device)
    _, data = problem("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N // 2 if slots else N, steps=6, noise_multiplier=0.5, delta=1e-5
    )
    with dpoptim.attach(plan, model, optimizer, data) as private:
        backward = private.graphed(lambda x, y: F.cross_entropy(model(x), y, reduction="none"))
        for x, y in private.batches(fixed_shape=slots):
            backward(x.float().to(device), y.to(device))
            optimizer.step()
            if captures:  # by which nothing is replayed
                private.finish()
    assert backward.captured
