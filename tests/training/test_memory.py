"""The physical batch size that is found fits the memory, nearly fills it, and trains to the same update."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.plan import Plan
from dpoptim.training.memory import LiveTensors, peak_memory, rows_of

Batch = tuple[Tensor, Tensor]
MODELS = {
    "mlp": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 3)
    ),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 3)
    ),
    "fallback": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.PReLU(64), nn.Linear(64, 3)),
}


def plan(batch_size: int = 400, method: Any = None) -> Plan:
    method = method or dpoptim.DPSGD(1.0)
    result: Plan = method.plan(n=5000, batch_size=batch_size, steps=3, noise_multiplier=0.0, delta=1e-5)
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


@pytest.mark.parametrize("name", MODELS)
def test_what_is_found_fits_and_nearly_fills(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    need = peak_memory(plan(), model, loss, rows_of(example(), 100))
    torch.set_rng_state(generator)
    found = dpoptim.physical_batch_size(plan(), model, loss, example(), max_memory=need)
    assert peak_memory(plan(), model, loss, rows_of(example(), found)) <= need
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
        size = dpoptim.physical_batch_size(plan(), model, loss, example(), max_memory=4 * 2**20) if limited else None
        assert size is None or size < 300
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with dpoptim.attach(plan(), model, optimizer, data, noise_seed=0) as private:
            for a, b in private.batches(physical_batch_size=size):
                loss(model, (a, b)).backward()
                optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


def test_the_sampler_sets_the_upper_end() -> None:
    found = dpoptim.physical_batch_size(plan(50), MODELS["mlp"](), loss, example(), max_memory=2**40)
    assert found == plan(50).sampler.capacity(5000)


def test_too_little_memory_says_what_a_row_takes() -> None:
    with pytest.raises(ValueError, match=r"max_memory=1000 is too little: a pass over 1 rows takes \d+ bytes"):
        dpoptim.physical_batch_size(plan(), MODELS["mlp"](), loss, example(), max_memory=1000)
    with pytest.raises(ValueError, match="max_memory must be a whole number"):
        dpoptim.physical_batch_size(plan(), MODELS["mlp"](), loss, example(), max_memory=0)
    with pytest.raises(ValueError, match="first axis is the record"):
        dpoptim.physical_batch_size(plan(), MODELS["mlp"](), loss, example(0), max_memory=2**30)
    with pytest.raises(ValueError, match="not for ValueClippedSGD"):
        dpoptim.physical_batch_size(
            plan(method=dpoptim.ValueClippedSGD(1.0)), MODELS["mlp"](), loss, example(), max_memory=2**30
        )
