"""The physical batch size that is found fits the memory, nearly fills it, and trains to the same
update.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.plan import Plan
from dpoptim.training.trials.memory import LiveTensors, peak_memory, rows_of

Batch = tuple[Tensor, Tensor]
MODELS = {
    "mlp": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 400),
        nn.ReLU(),
        nn.Linear(400, 400),
        nn.ReLU(),
        nn.Linear(400, 3),
    ),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 3),
    ),
    "fallback": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.PReLU(64), nn.Linear(64, 3)
    ),
}

# for what does not depend on the model
SMALL = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3))  # noqa: E731


def plan(batch_size: int = 400, method: Any = None) -> Plan:
    method = method or dpoptim.DPSGD(1.0)
    result: Plan = method.plan(
        n=5000, batch_size=batch_size, steps=3, noise_multiplier=0.0, delta=1e-5
    )
    return result


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def example(rows: int = 3) -> Batch:
    return torch.randn(rows, 8, 8), torch.randint(0, 3, (rows,))


def test_live_tensors_counts_what_is_alive_at_once() -> None:
    with LiveTensors() as live:
        a = torch.zeros(1000)  # 4,000 bytes
        b = a.view(10, 100).T  # nothing of its own
        c = a + 1
        c += 1
        del c
        d = torch.cat([a, a]).double()  # 8,000 for a moment, and 16,000
    assert live.peak == 4000 + 8000 + 16000
    assert b.shape == (100, 10)
    assert d.dtype == torch.float64


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_found_fits_and_nearly_fills(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    need = peak_memory(plan(), model, loss, rows_of(example(), 100), 100)
    torch.set_rng_state(generator)
    found = dpoptim.physical_batch_size(plan(), model, loss, example(), max_memory=need)
    assert peak_memory(plan(), model, loss, rows_of(example(), found), found) <= need
    assert 90 <= found <= 110
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert "forward" not in vars(model)


def test_training_in_what_fits_gives_the_same_update() -> None:
    x = torch.randn(5000, 8, 8)
    data = TensorDataset(x, (x.flatten(1) @ torch.randn(64, 3)).argmax(1))
    results = []
    for limited in (False, True):
        torch.manual_seed(0)
        model = MODELS["mlp"]()
        # smooth: beside fewer rows a unit is rounded another way, and may be on ReLU's other side
        model[2], model[4] = nn.Tanh(), nn.Tanh()
        size = (
            dpoptim.physical_batch_size(plan(), model, loss, example(), max_memory=4 * 2**20)
            if limited
            else None
        )
        assert size is None or size < 300
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with dpoptim.attach(plan(), model, optimizer, data, noise_seed=0) as private:
            for a, b in private.batches(physical_batch_size=size):
                loss(model, (a, b)).backward()
                optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


def test_the_sampler_sets_the_upper_end() -> None:
    found = dpoptim.physical_batch_size(plan(50), SMALL(), loss, example(), max_memory=2**40)
    assert found == plan(50).sampler.capacity(5000)


def test_too_little_memory_says_what_a_row_takes() -> None:
    with pytest.raises(
        ValueError,
        match=r"max_memory=1000 is too little: a pass over a single "
        r"row takes \d+ bytes",
    ):
        dpoptim.physical_batch_size(plan(), SMALL(), loss, example(), max_memory=1000)
    with pytest.raises(ValueError, match="batch must hold tensors, in tuples"):
        dpoptim.physical_batch_size(plan(), SMALL(), loss, 5, max_memory=2**30)
    with pytest.raises(TypeError, match=r"plan must be a dpoptim\.Plan"):
        dpoptim.physical_batch_size("plan", SMALL(), loss, example(), max_memory=2**30)  # type: ignore[arg-type]
    with pytest.raises(dpoptim.PrivacyError, match="DataParallel"):
        dpoptim.physical_batch_size(
            plan(), nn.DataParallel(SMALL()), loss, example(), max_memory=2**30
        )
    with pytest.raises(ValueError, match="max_memory must be a whole number"):
        dpoptim.physical_batch_size(plan(), SMALL(), loss, example(), max_memory=0)
    with pytest.raises(ValueError, match="first axis is the record"):
        dpoptim.physical_batch_size(plan(), SMALL(), loss, example(0), max_memory=2**30)
    with pytest.raises(ValueError, match="not for value clipping"):
        dpoptim.physical_batch_size(
            plan(method=dpoptim.ValueClippedSGD(1.0)),
            SMALL(),
            loss,
            example(),
            max_memory=2**30,
        )


def test_a_data_set_of_dicts_is_measured_as_it_will_run() -> None:
    """Positions are looked up in a record of the batch's own kind; else norms are claimed here and
    formed there.
    """

    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(256, 256), nn.Linear(256, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.hidden(x)).mean(1))

    def of_dict(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    batch = {"x": torch.randn(3, 8, 256), "y": torch.zeros(3).long()}
    model, limit = Sequences(), 16 * 2**20
    size = dpoptim.physical_batch_size(plan(), model, of_dict, batch, max_memory=limit)

    class Records(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 5000

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {key: value[index % 3] for key, value in batch.items()}

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, optimizer, Records()) as private:
        microbatch = next(private.batches(physical_batch_size=size))
        with LiveTensors() as live:
            of_dict(model, microbatch).backward()
    assert live.peak <= limit


@pytest.mark.parametrize("most", [0, 1, 7, 60, 300])
def test_a_device_that_runs_out_of_memory(most: int) -> None:
    """More is allowed than there is: what the device holds is found all the same."""

    def limited(model: nn.Module, batch: Batch) -> Tensor:
        if len(batch[0]) > most:
            raise torch.OutOfMemoryError
        return loss(model, batch)

    arguments: Any = (plan(), SMALL(), limited, example())
    if most == 0:
        with pytest.raises(ValueError, match="too little"):
            dpoptim.physical_batch_size(*arguments, max_memory=2**40)
        return
    assert most * 0.9 <= dpoptim.physical_batch_size(*arguments, max_memory=2**40) <= most


def test_buffers_are_as_before() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x.flatten(1))

    model = Counting()
    with pytest.raises(dpoptim.SamplesInteractError, match="writes into 'calls'"):
        dpoptim.physical_batch_size(plan(), model, loss, example(), max_memory=2**20)
    assert float(model.calls) == 0
