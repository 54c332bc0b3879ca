"""`batches(fixed_shape=True)`: every physical batch has a public number of rows, and what is empty
counts as zero.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binom
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import Dataset, TensorDataset

import dpoptim
from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import PoissonSampling
from dpoptim.training.batches import empty_slots
from dpoptim.training.batches.microbatches import BatchQueue
from dpoptim.training.batches.privacy_units import NO_ROW
from dpoptim.training.batches.slots import SHARE, Slots, SlotSampler, lost_delta, slots_needed

N, FEATURES, CLASSES = 60, 5, 3


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def data_of() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(N, FEATURES), torch.randint(0, CLASSES, (N,)))


def plan(
    steps: int = 4, batch_size: int = 8, clip_norm: float = 0.3, **options: Any
) -> dpoptim.Plan:
    options = {"noise_multiplier": 0, "delta": 1e-5} | options
    return dpoptim.DPSGD(clip_norm=clip_norm).plan(
        n=N, batch_size=batch_size, steps=steps, **options
    )


def trained(
    data: Dataset[Any], chosen: dpoptim.Plan, loader: dict[str, Any], **options: Any
) -> tuple[Tensor, set[int]]:
    """The parameters after a run, and the numbers of rows that were delivered."""
    model, rows = model_of(), set()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dpoptim.attach(chosen, model, optimizer, data, noise_seed=7, **options) as private:
        for x, y in private.batches(**loader):
            rows.add(len(x))
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), rows


@dataclass(frozen=True)
class Kept:
    label: int


@dataclass(frozen=True)
class Record:
    x: Tensor
    rest: dict[str, Kept]


class Records(Dataset[Any]):
    """The same records as dataclasses, one in the other."""

    def __init__(self) -> None:
        self.data = data_of()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Record:
        x, y = self.data[index]
        return Record(x, {"kept": Kept(int(y))})


def test_dataclasses_are_records() -> None:
    def loss(model: nn.Module, batch: Record) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.rest["kept"].label, reduction="none")  # type: ignore[arg-type]

    ends = []
    for data, own in ((Records(), loss), (data_of(), None)):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with dpoptim.attach(plan(), model, optimizer, data, noise_seed=7, loss=own) as private:
            for step in private.steps(fixed_shape=True, num_workers=int(own is not None)):
                for batch in step:
                    x, y = (batch.x, batch.rest["kept"].label) if own else batch
                    private.backward(F.cross_entropy(model(x), y, reduction="none"))
                optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends)


def test_shapes_and_made_up_records_inside_dataclasses() -> None:
    data, collate = empty_slots.fixed_shape(Records(), None, 3, own=False)
    empty = data[NO_ROW]
    assert collate.empty.x.eq(1).all()
    assert collate.empty.rest["kept"].label == 1
    collate([data[1], empty, data[2]])
    with pytest.raises(dpoptim.PrivacyError, match="different shapes"):
        collate([data[1], empty])


class Items(Dataset[Any]):
    """The same records, item by item, with labels that are plain numbers."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = self.data[index]
        return x, int(y)


@pytest.mark.set_aside("whole")
@pytest.mark.parametrize(
    "loader",
    [{}, {"physical_batch_size": 7}, {"num_workers": 1}],
    ids=["whole", "in microbatches", "by a worker"],
)
def test_the_update_is_that_of_other_batches(loader: dict[str, Any]) -> None:
    data = data_of()
    for chosen in (plan(), plan(neighboring="zero-out"), plan(batch_size=N)):
        usual, _ = trained(data, chosen, {})
        fixed, rows = trained(
            Items(data) if loader else data, chosen, {"fixed_shape": True} | loader
        )
        assert len(rows) == 1
        torch.testing.assert_close(fixed, usual, atol=1e-6, rtol=1e-5)


def test_other_methods_and_units() -> None:
    torch.manual_seed(1)
    views = TensorDataset(torch.randn(N, 2, FEATURES), torch.randint(0, CLASSES, (N, 2)))
    owners = [i // 3 for i in range(N)]
    persons = dpoptim.DPSGD(clip_norm=0.3).plan(
        n=N // 3, batch_size=5, steps=4, noise_multiplier=0, delta=1e-5
    )
    ftrl = dpoptim.DPFTRL(clip_norm=0.3).plan(
        n=N, batch_size=8, epochs=1, noise_multiplier=0, delta=1e-5
    )
    values = dpoptim.ValueClippedSGD(clip_norm=0.3).plan(
        n=N, batch_size=8, steps=4, noise_multiplier=0, delta=1e-5
    )
    cases: list[tuple[Dataset[Any], dpoptim.Plan, dict[str, Any]]] = [
        (views, plan(), {"rows_per_record": 2}),
        (data_of(), persons, {"persons": owners, "rows_per_record": 2}),
        (data_of(), ftrl, {}),
        (data_of(), values, {}),
    ]
    for data, chosen, options in cases:
        usual, _ = trained(data, chosen, {}, **options)
        fixed, rows = trained(data, chosen, {"fixed_shape": True}, **options)
        assert len(rows) == 1
        torch.testing.assert_close(fixed, usual, atol=1e-5, rtol=1e-3)  # margins differ


def test_empty_slots_add_nothing_whatever_the_loss_makes_of_them() -> None:
    class Direction(nn.Module):  # of a record of zeros: not a number
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x / x.norm(dim=1, keepdim=True))

    data, found = data_of(), []
    for fixed_shape in (False, True):
        torch.manual_seed(0)
        model = Direction()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with dpoptim.attach(plan(), model, optimizer, data, noise_seed=7) as private:
            for x, y in private.batches(fixed_shape=fixed_shape):
                private.backward(F.cross_entropy(model(x), y, reduction="none"))
                optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)
    assert torch.isfinite(found[1]).all()


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(1, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            x[:, :, None], lengths, batch_first=True, enforce_sorted=False
        )
        return self.layer(packed)[1][0].sum(1)


class Rows(Dataset[Any]):
    def __init__(self, columns: TensorDataset) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, index: int) -> Any:
        x, length = self.columns[index]
        return x, int(length)


@pytest.mark.parametrize("rows", [lambda columns: columns, Rows])
def test_empty_slots_can_be_packed(rows: Callable[[TensorDataset], Dataset[Any]]) -> None:
    """As sequences of one: a length of 0 is refused by torch."""
    data = rows(TensorDataset(data_of().tensors[0], torch.arange(N) % FEATURES + 1))
    found = []
    for loader in ({}, {"fixed_shape": True}):
        torch.manual_seed(0)
        model = Packed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with dpoptim.attach(plan(), model, optimizer, data, noise_seed=7) as private:
            for x, lengths in private.batches(**loader):
                private.backward(model(x, lengths))
                optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(
    ("n", "batch_size", "steps"), [(60_000, 512, 1000), (1000, 16, 50), (60_000, 16_384, 100)]
)
def test_slots_are_the_fewest_that_delta_allows(n: int, batch_size: int, steps: int) -> None:
    chosen = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=n, batch_size=batch_size, steps=steps, noise_multiplier=1.0, delta=1e-5
    )
    for processes, sharded in ((1, False), (1, True), (3, False), (3, True)):
        S, q = slots_needed(chosen, processes, sharded=sharded), batch_size / n
        each = q if sharded else q / processes
        lost = [steps * processes * binom.sf(least - 1, n - 1, each) for least in (S, S - 1)]
        assert lost[0] <= lost_delta(chosen) == SHARE * 1e-5 < lost[1] * (1 + 1e-9)
    assert Slots.of(chosen, 100).rows <= 100 < Slots.of(chosen, None).rows + 100
    assert slots_needed(plan(batch_size=N)) == N


def test_a_slot_is_taken_by_every_record_as_often_and_once() -> None:
    """Each record's slot is uniform, also given another one's: the injection of the theorem."""
    queue = BatchQueue(PoissonSampling(1.0), KeyStream(), 3, 3000)
    sampler = SlotSampler(
        queue,
        Slots(rows=2, microbatches=3),
        lambda step: KeyStream.from_seed(5, f"step {step}"),
        rows=1,
    )
    placed = np.array(list(sampler.microbatches())).reshape(3000, 6)
    assert np.all(np.sort(placed, axis=1) == [NO_ROW, NO_ROW, NO_ROW, 0, 1, 2])
    slot = np.stack([(placed == record).argmax(1) for record in range(3)])
    pairs = np.bincount(6 * slot[0] + slot[1], minlength=36).reshape(6, 6)
    expected = 3000 / 30
    assert np.all(np.diag(pairs) == 0)
    assert np.all(np.abs(pairs[~np.eye(6, dtype=bool)] - expected) < 5 * math.sqrt(expected))


def test_a_batch_that_outgrows_its_slots_is_not_cut() -> None:
    queue = BatchQueue(PoissonSampling(1.0), KeyStream(), 9, 2)
    sampler = SlotSampler(queue, Slots(rows=2, microbatches=3), lambda step: KeyStream(), rows=1)
    microbatches = list(sampler.microbatches())
    assert len(microbatches) == 10
    assert [note.last for note in sampler.drawn] == [False, False, False, False, True] * 2
    assert set(np.concatenate(microbatches[:5])) == {NO_ROW, *range(9)}


def test_what_it_rests_on_is_said() -> None:
    chosen = plan(noise_multiplier=1.0, clip_norm=1.0)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(chosen, model, optimizer, data_of()) as private:
        assert "kernels are batch-invariant" in private.describe()
        for x, y in private.batches(fixed_shape=True):
            F.cross_entropy(model(x), y, reduction="none").mean().backward()
            optimizer.step()
        said = private.describe()
        assert "kernels are batch-invariant" not in said
        assert "the factor of a mean" not in said
        assert f"at most {N} records" in said
        assert private.spent().delta == 1e-5
        assert (
            chosen.guarantee.epsilon
            < private.spent().epsilon
            < chosen.guarantee.epsilon * (1 + 1e-4)
        )


class Ragged(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(1 + index % 4, FEATURES), index % CLASSES


def padded(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    x = nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
    return x, torch.tensor([y for _, y in items])


def test_padding_to_the_longest_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES))
    model(torch.zeros(1, FEATURES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        dpoptim.attach(plan(batch_size=N), model, optimizer, Ragged()) as private,
        pytest.raises(dpoptim.PrivacyError, match="one public length"),
    ):
        next(iter(private.batches(fixed_shape=True, collate_fn=padded)))
