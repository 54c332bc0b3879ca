"""A person is one item, whatever it owns: neighbouring data sets differ in one item, whose gradient is clipped once."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import dpoptim
from dpoptim.data import Data
from dpoptim.data import persons as persons_module
from dpoptim.data.persons import choose_records, gather_persons
from dpoptim.noise.stream import KeyStream
from dpoptim.runs.models import build_model
from dpoptim.runs.train import record_losses, training_set
from dpoptim.unit import Unit

C = 0.1
Chooser = Callable[[NDArray[np.int64], int, KeyStream], NDArray[np.int64]]


class Scripted:
    """Coins that are functions of the record, so that neighbours may share them."""

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self._words = words

    def words(self, out: NDArray[np.uint64]) -> None:
        out[:] = self._words


def people(counts: list[int], seed: int = 0, size: float = 1.0) -> Data:
    rng = np.random.default_rng(seed)
    owner = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    x = (rng.normal(size=(len(owner), 4)) * size).astype(np.float32)
    y = rng.integers(0, 3, len(owner))
    return Data("made up", x, y, None, None, ("a", "b", "c"), public=False, persons=owner)


def test_at_most_m_records_each_its_own_and_none_twice() -> None:
    data = people([1, 2, 3, 7, 40])
    assert data.persons is not None
    chosen = choose_records(data.persons, 3, KeyStream())
    assert (chosen >= 0).sum(1).tolist() == [1, 2, 3, 3, 3]
    for person, row in enumerate(chosen):
        mine = row[row >= 0]
        assert len(set(mine.tolist())) == len(mine)
        assert (data.persons[mine] == person).all()


def test_every_record_of_a_person_is_as_likely_as_another() -> None:
    owner = np.array([0] * 5 + [1] * 2)
    stream = KeyStream.from_seed(1, "test")
    taken = np.zeros(7)
    for _ in range(4000):
        row = choose_records(owner, 2, stream)
        taken += np.bincount(row[row >= 0], minlength=7)
    np.testing.assert_allclose(taken[:5] / 4000, 0.4, atol=0.04)
    assert (taken[5:] == 4000).all()


def by_value(data: Data) -> Chooser:
    """The seeded bug: the records with the largest values are taken, until the whole table's are used up."""

    def choose(owner: NDArray[np.int64], most: int, coins: KeyStream) -> NDArray[np.int64]:
        order = np.argsort(-np.abs(data.x).sum(1))
        chosen = np.full((int(owner.max()) + 1, most), -1)
        for record in order[: len(order) // 2]:  # how many are left for a person depends on the others
            free = np.flatnonzero(chosen[owner[record]] < 0)
            if len(free):
                chosen[owner[record], free[0]] = record
        return chosen

    return choose


def items_that_differ(data: Data, person: int) -> int:
    """How many persons' items change when one person's values all change, under the same coins."""
    rng = np.random.default_rng(5)
    words = rng.integers(0, 2**63, len(data.x), dtype=np.uint64)
    assert data.persons is not None
    x = data.x.copy()
    x[data.persons == person] *= 1000
    other = Data(data.name, x, data.y, None, None, data.class_names, public=False, persons=data.persons)
    a, b = (gather_persons(each, 3, Scripted(words)) for each in (data, other))  # type: ignore[arg-type]
    different = (a.x != b.x).any((1, 2)) | (a.y != b.y).any(1) | (a.weights != b.weights).any(1)
    return int(different.sum())


def test_changing_one_person_changes_one_item() -> None:
    data = people([1, 2, 3, 7, 40, 5])
    assert [items_that_differ(data, person) for person in range(6)] == [1] * 6


def test_a_choice_by_values_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    data = people([4, 4, 4, 4])
    x = data.x.copy()
    choices = iter([by_value(data), by_value(Data("", x, data.y, None, None, (), False, persons=data.persons))])
    assert data.persons is not None
    x[data.persons == 0] *= 1000
    monkeypatch.setattr(persons_module, "choose_records", lambda *args: next(choices)(*args))
    assert items_that_differ(data, 0) > 1


def clipped_sum(data: Data, most: int, name: str) -> torch.Tensor:
    """The sum that one full batch of persons hands to the gate, noise off: what the optimizer receives times n."""
    torch.manual_seed(0)
    model = build_model(name, (4,), 3)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = dpoptim.DPSGD(clip_norm=C).plan(n=8, batch_size=8, steps=1, noise_multiplier=0, delta=1e-5)
    with dpoptim.attach(
        plan, model, optimizer, training_set(data, Unit("person", most), 3), loss_reduction="sum"
    ) as private:
        for x, y, weights in private.batches():
            (record_losses(model(x), y) * weights).sum().backward()
            optimizer.step()
    return torch.cat([8 * (a - b.detach()).flatten() for a, b in zip(start, model.parameters(), strict=True)])


@pytest.mark.parametrize("name", ["softmax", "mlp"])
@pytest.mark.parametrize("most", [1, 3, 50])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_one_person_moves_the_sum_by_at_most_c(name: str, most: int, size: float) -> None:
    """However many records it owns and however large they are; and the last person reaches the bound."""
    counts = [1, 2, 3, 7]
    with_one, without = people([*counts, 40], size=size), people([*counts, 40], size=size)
    assert without.persons is not None
    keep = without.persons < 4
    smaller = Data(
        "made up", without.x[keep], without.y[keep], None, None, without.class_names, False, persons=without.persons[keep]
    )
    if most < 7:  # the coins of the rest must be the same in both worlds: take persons that have no choice
        few = [1] * 4
        with_one = people([*few, 40], size=size)
        assert with_one.persons is not None
        keep = with_one.persons < 4
        smaller = Data(
            "made up",
            with_one.x[keep],
            with_one.y[keep],
            None,
            None,
            with_one.class_names,
            False,
            persons=with_one.persons[keep],
        )
    moved = (clipped_sum(with_one, most, name) - clipped_sum(smaller, most, name)).norm().item()
    assert moved <= C * 1.0001
    assert moved > 0.9 * C  # the attack has teeth: the bound is reached


def test_a_persons_gradient_is_that_of_its_mean_loss() -> None:
    """Against autograd, person by person."""
    data = people([1, 2, 3, 7])
    gathered = gather_persons(data, 50, KeyStream())
    torch.manual_seed(0)
    model = build_model("mlp", (4,), 3)
    total = torch.zeros(sum(p.numel() for p in model.parameters()))
    assert data.persons is not None
    for person in range(4):
        mine = data.persons == person
        loss = record_losses(model(torch.from_numpy(data.x[mine])), torch.from_numpy(data.y[mine])).mean()
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        total += gradient * min(1, C / gradient.norm().item())
    assert gathered.weights.sum(1).tolist() == pytest.approx([1] * 4)
    torch.testing.assert_close(clipped_sum(data, 50, "mlp"), total, atol=1e-3, rtol=1e-2)  # the margin on C


def test_the_plan_says_whom_it_protects() -> None:
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(n=1000, batch_size=100, steps=10, noise_multiplier=1.0, delta=1e-5)
    from dataclasses import replace

    persons = replace(plan, unit=Unit("person", 8))
    assert "per person" in str(persons.guarantee)
    assert persons.guarantee.epsilon == plan.guarantee.epsilon
    assert any("at most 8 records of a person" in each.text for each in persons.basis)
    assert not any("no person contributed more than one" in each.text for each in persons.basis)
    assert dpoptim.Plan.from_json(persons.to_json()) == persons
    edited = plan.to_json().replace('"unit": "record"', '"unit": "household"')
    with pytest.raises(ValueError, match="edited"):
        dpoptim.Plan.from_json(edited)
