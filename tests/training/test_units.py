"""`attach` with records of several rows, and with persons who own rows: what is delivered, summed
and said.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dpoptim
from dpoptim.data import views
from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import PoissonSampling
from dpoptim.training.batches.microbatches import BatchQueue
from dpoptim.training.batches.privacy_units import NO_ROW, Persons
from dpoptim.training.private_training import PrivateTraining

FEATURES, CLASSES, K = 5, 3, 3


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def plan(
    n: int, steps: int = 4, batch_size: int = 8, clip_norm: float = 1e6, **options: Any
) -> dpoptim.Plan:
    options = {"noise_multiplier": 0, "delta": 1e-5} | options
    return dpoptim.DPSGD(clip_norm=clip_norm).plan(
        n=n, batch_size=batch_size, steps=steps, **options
    )


def stacked(n: int = 20) -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(n, K, FEATURES), torch.randint(0, CLASSES, (n, K)))


def trained(
    data: Dataset[Any], chosen: dpoptim.Plan, *, loader: dict[str, Any], **options: Any
) -> Tensor:
    """The parameters after a run whose losses are one a row."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dpoptim.attach(chosen, model, optimizer, data, noise_seed=7, **options) as private:
        for x, y in private.batches(**loader):
            F.cross_entropy(model(x), y, reduction="none").mean().backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Items(Dataset[Any]):
    """The same records, item by item."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[index]


def rows_only(items: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """A collate function of rows: it would stack records to three axes."""
    assert all(x.shape == (FEATURES,) and y.dim() == 0 for x, y in items)
    return [torch.stack(column) for column in zip(*items, strict=True)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_clipping_it_is_plain_training_on_all_rows(reduction: str) -> None:
    data = stacked()
    ours = trained(
        data, plan(20, batch_size=20), loader={}, rows_per_record=K, rows_reduction=reduction
    )
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = (t.flatten(0, 1) for t in data.tensors)
    for _ in range(4):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * (K if reduction == "sum" else 1)).backward()
        optimizer.step()
    plain = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_are_one_a_row_or_one_a_record(reduction: str) -> None:
    """As vectors and as scalars: the same update, where a record's own loss is what is made of its
    rows' losses.
    """
    data, chosen = stacked(), plan(20, clip_norm=0.3)

    def of_records(losses: Tensor) -> Tensor:
        return losses.view(-1, K).mean(1) if reduction == "mean" else losses.view(-1, K).sum(1)

    hand_over = {
        "rows": lambda losses: losses,
        "records": of_records,
        "mean of rows": torch.mean,
        "sum of rows": torch.sum,
        "mean of records": lambda losses: of_records(losses).mean(),
        "sum of records": lambda losses: of_records(losses).sum(),
    }
    found = []
    for handed_over in hand_over.values():
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with dpoptim.attach(
            chosen,
            model,
            optimizer,
            data,
            noise_seed=7,
            rows_per_record=K,
            rows_reduction=reduction,
        ) as private:
            for x, y in private.batches():
                private.backward(handed_over(F.cross_entropy(model(x), y, reduction="none")))
                optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "loader",
    [{"physical_batch_size": 2 * K + 1}, {"num_workers": 1}, {"collate_fn": rows_only}],
    ids=["in microbatches", "by a worker", "collated by the caller"],
)
def test_delivery_does_not_change_the_update(loader: dict[str, Any]) -> None:
    data, chosen = stacked(), plan(20, clip_norm=0.3)
    whole = trained(data, chosen, loader={}, rows_per_record=K)
    torch.testing.assert_close(
        trained(Items(data), chosen, loader=loader, rows_per_record=K), whole, atol=1e-6, rtol=1e-5
    )


def test_a_record_of_equal_rows_is_a_record_of_one_row() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(20, FEATURES), torch.randint(0, CLASSES, (20,))
    chosen = plan(20, clip_norm=0.3)
    one = trained(TensorDataset(x, y), chosen, loader={})
    # a label that the rows of a record share
    same = TensorDataset(x[:, None].expand(-1, K, -1), y)
    torch.testing.assert_close(
        trained(same, chosen, loader={}, rows_per_record=K), one, atol=1e-6, rtol=1e-5
    )


def test_persons_with_their_rows_are_records_of_these_rows() -> None:
    """Whoever has m rows brings them all; the update is that of stacked records, in the order of
    their first rows.
    """
    data, chosen = stacked(), plan(20, clip_norm=0.3)
    torch.manual_seed(2)
    order = torch.randperm(20 * K)
    rows = TensorDataset(*(t.flatten(0, 1)[order] for t in data.tensors))
    met = list(dict.fromkeys((order // K).tolist()))
    in_order = TensorDataset(*(t[met] for t in data.tensors))
    whole = trained(in_order, chosen, loader={}, rows_per_record=K)
    owners = [f"p{int(i):03d}" for i in order // K]
    for loader in ({}, {"physical_batch_size": 2 * K}, {"num_workers": 1}):
        found = trained(rows, chosen, loader=loader, rows_per_record=K, persons=owners)
        torch.testing.assert_close(found, whole, atol=1e-6, rtol=1e-5)


def test_persons_with_fewer_rows_count_them_once() -> None:
    """A person of one row, filled up to K, is a record of one row."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(20, FEATURES), torch.randint(0, CLASSES, (20,)))
    chosen = plan(20, clip_norm=0.3)
    alone = trained(data, chosen, loader={})
    for reduction in ("mean", "sum"):
        found = trained(
            data, chosen, loader={}, persons=range(20), rows_per_record=K, rows_reduction=reduction
        )
        torch.testing.assert_close(found, alone, atol=1e-6, rtol=1e-5)


def test_a_person_brings_at_most_so_many_rows_each_choice_as_likely() -> None:
    owners = np.array([0] * 5 + [1] * 2 + [2])
    persons, coins = Persons.of(owners, 8, 2), KeyStream.from_seed(0, "rows")
    counts = np.zeros(8)
    for _ in range(4000):
        brought = persons.bring(coins, np.array([0, 2, 1]))
        assert brought.shape == (3, 2)
        assert len(set(brought[0]) & set(range(5))) == 2
        assert brought[1].tolist() == [7, NO_ROW]
        assert set(brought[2]) == {5, 6}
        counts[brought[0]] += 1
    expected, deviation = 4000 * 2 / 5, (4000 * 0.4 * 0.6) ** 0.5
    assert np.all(np.abs(counts[:5] - expected) < 4.5 * deviation)


@pytest.mark.parametrize("name", ["a", "m", "z"])
def test_another_name_for_somebody_moves_nobody_else(name: str) -> None:
    """Records are neighbours by place, and so are persons: a name is no place."""
    owners = ["k", "b", "k", "t", "b", "t", "t"]
    before = Persons.of(owners, 7, 2)
    after = Persons.of([name if owner == "k" else owner for owner in owners], 7, 2)
    assert before.numbers.tolist() == after.numbers.tolist() == [0, 1, 0, 2, 1, 2, 2]
    assert before.digest == after.digest
    assert after.names.tolist() == [name, "b", "t"]


@pytest.mark.parametrize("nobody", ["", "nan", "None", "<NA>", b"NULL"])
def test_rows_without_an_owner_are_not_one_person(nobody: str | bytes) -> None:
    """Two persons who each have a row without a name would move the mean of all such rows."""
    names: list[str | bytes] = [b"\xe9", b"k"] if isinstance(nobody, bytes) else ["é", "k"]
    assert len(Persons.of(names * 3, 6, 2)) == 2
    with pytest.raises(ValueError, match=r"rows without an owner .* Fix: give each") as refused:
        Persons.of([*names, nobody, nobody], 4, 2)
    assert "k" not in str(refused.value).split()


def test_an_empty_batch_takes_its_step() -> None:
    data = TensorDataset(torch.randn(4, FEATURES), torch.randint(0, CLASSES, (4,)))
    chosen = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=10**6, batch_size=1, steps=3, noise_multiplier=0, delta=1e-5
    )
    before = torch.cat([p.detach().flatten() for p in model_of().parameters()])
    assert torch.equal(
        trained(data, chosen, loader={}, persons=[0, 0, 1, 1], rows_per_record=2), before
    )


def test_a_loop_that_is_left_and_entered_again_gets_the_same_rows() -> None:
    model, data = (
        model_of(),
        TensorDataset(torch.randn(40, FEATURES), torch.randint(0, CLASSES, (40,))),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = plan(4, batch_size=3)
    with dpoptim.attach(
        chosen, model, optimizer, data, persons=[i % 4 for i in range(40)], rows_per_record=3
    ) as private:
        first = next(iter(private.batches()))[0]
        for _ in range(3):
            assert torch.equal(next(iter(private.batches()))[0], first)


def test_a_checkpoint_keeps_the_rows_that_were_drawn() -> None:
    persons = Persons.of([i % 4 for i in range(40)], 40, 3)

    def queue() -> BatchQueue:
        return BatchQueue(
            PoissonSampling(0.9), KeyStream(), 4, 5, partial(persons.bring, KeyStream())
        )

    first = queue()
    drawn = [batch for _, batch in zip(range(3), first.ahead(), strict=False)]
    restored = queue()
    restored.restore(first.secret_state())
    again = [batch for _, batch in zip(range(3), restored.ahead(), strict=False)]
    assert all(
        batch.shape[1] == 3 and np.array_equal(batch, same)
        for batch, same in zip(drawn, again, strict=True)
    )


def test_a_checkpoint_of_other_units_is_refused(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(40, FEATURES), torch.randint(0, CLASSES, (40,)))

    def attached(resume: Path | None, **units: Any) -> PrivateTraining:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return dpoptim.attach(plan(4, batch_size=3), model, optimizer, data, resume=resume, **units)

    owners = [i % 4 for i in range(40)]
    with attached(None, persons=owners, rows_per_record=3) as private:
        private.save(tmp_path / "run")
    with attached(tmp_path / "run", persons=owners, rows_per_record=3):
        pass
    for units in ({"persons": owners, "rows_per_record": 2}, {}):
        with pytest.raises(ValueError, match="persons and rows_per_record"):
            attached(tmp_path / "run", **units)


def test_the_unit_is_printed() -> None:
    data = TensorDataset(torch.randn(40, FEATURES), torch.randint(0, CLASSES, (40,)))
    chosen = plan(4, batch_size=2, noise_multiplier=1.0, clip_norm=1.0)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(
        chosen, model, optimizer, data, persons=[f"{i % 4}" for i in range(40)], rows_per_record=3
    ) as private:
        for x, y in private.batches():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert "per person" in str(private.spent())
        texts = [item.text for item in private.basis]
        assert any("at most 3 a step" in text for text in texts)
        assert not any("no person contributed more than one" in text for text in texts)
        assert "with any one person as without it" in private.describe()
        assert "each person joins each step" in private.describe()
    other = TensorDataset(torch.randn(40, FEATURES), torch.randint(0, CLASSES, (40,)))
    with dpoptim.attach(chosen, model, optimizer, other, persons=[i % 4 for i in range(40)]) as one:
        assert "at most 1 a step take part (rows_per_record=1)" in one.describe()


def test_views_average_a_records_gradients() -> None:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(20, FEATURES), torch.randint(0, CLASSES, (20,)))
    seen = views(data, lambda x: x + 0.5 * torch.randn_like(x), 4)
    x, y = seen[3]
    assert (tuple(x.shape), tuple(y.shape), len(seen)) == ((4, FEATURES), (4,), 20)
    assert len(torch.unique(x, dim=0)) == 4
    chosen = plan(20, batch_size=20, steps=30, clip_norm=1.0)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    before = F.cross_entropy(model(data.tensors[0]), data.tensors[1])
    with dpoptim.attach(chosen, model, optimizer, seen, rows_per_record=4) as private:
        for x, y in private.batches():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert F.cross_entropy(model(data.tensors[0]), data.tensors[1]) < 0.7 * before


WRONG = {
    "no rows": ({"rows_per_record": 0}, "rows_per_record"),
    "other rows": ({"rows_per_record": 4}, "does not hold 4 rows"),
    "reduction": ({"rows_per_record": K, "rows_reduction": "max"}, "rows_reduction"),
    "partial": ({"rows_per_record": K, "partial_backward": True}, "partial_backward"),
    "owners": ({"persons": [1, 2]}, "owner of each item"),
    "unclear owners": ({"persons": [float("nan")] * 20}, "whole numbers or strings"),
    "owners by row": ({"persons": dict.fromkeys(range(20), "a")}, "owner of each item"),
    "missing owners": ({"persons": [None, *["a"] * 19]}, "whole numbers or strings"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    options, message = WRONG[name]
    model = model_of()
    with pytest.raises((ValueError, TypeError), match=message):
        dpoptim.attach(
            plan(20), model, torch.optim.SGD(model.parameters(), lr=0.1), stacked(), **options
        )
    model(torch.randn(2, FEATURES))  # nothing is left attached


@pytest.mark.thinned(2)
@pytest.mark.parametrize("absent", [{0}, {0, 1, 2}, set(range(8))], ids=["one", "some", "all"])
@pytest.mark.parametrize("persons", [None, [i // 5 for i in range(40)]], ids=["records", "persons"])
def test_whoever_has_no_finite_numbers_does_not_decide_whether_a_run_starts(
    persons: list[int] | None, absent: set[int]
) -> None:
    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    x, y = torch.randn(40, FEATURES), torch.randint(0, CLASSES, (40,))
    for person in absent:
        x[5 * person : 5 * person + 5] = torch.nan
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = TensorDataset(x, y)
    options: dict[str, Any] = {} if persons is None else {"persons": persons, "rows_per_record": 2}
    with dpoptim.attach(plan(8), model, optimizer, data, loss=loss, **options) as private:
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_public_number_of_persons_must_be_the_planned_one() -> None:
    data = TensorDataset(torch.randn(40, FEATURES), torch.randint(0, CLASSES, (40,)))
    model = model_of()
    with pytest.raises(
        ValueError, match="4 persons but the plan was made for n=5, and n counts persons"
    ):
        dpoptim.attach(
            plan(5, batch_size=2, neighboring="zero-out"),
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            data,
            persons=[i % 4 for i in range(40)],
            rows_per_record=2,
        )


def test_memory_for_less_than_a_record_is_refused() -> None:
    model = model_of()
    with (
        dpoptim.attach(
            plan(20),
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            stacked(),
            rows_per_record=K,
        ) as private,
        pytest.raises(ValueError, match="the 3 rows of a record, .* Fix: at least 3"),
    ):
        next(iter(private.batches(physical_batch_size=K - 1)))
