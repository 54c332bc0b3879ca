"""`batches(fixed_shape=True)` and collate functions: an empty slot is told by its place."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

import dpoptim
from dpoptim.training.batches.slots import SAME, SAME_IF_COLLATED_SO, had_slots

N, FEATURES, CLASSES, LONGEST = 24, 4, 3, 6
Records = list[tuple[Tensor, Tensor]]
Collate = Callable[[Records], Any]


def records() -> Records:
    generator = torch.Generator().manual_seed(0)
    found = [(torch.randn(FEATURES, generator=generator), torch.tensor(i % 3)) for i in range(N)]
    found[-1] = (torch.full((FEATURES,), 50.0), torch.tensor(0))  # the first, where it is sorted
    return found


def stacked(rows: Records) -> tuple[Tensor, Tensor]:
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def summed(data: Any, collate: Collate | None, *, checked: bool = False, **batches: Any) -> Any:
    """The clipped sum of a step on all of the records, without noise, and the run."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES)
    before = [p.detach().clone() for p in model.parameters()]
    n = 2 * N  # nominal: every other slot is empty
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=n, batch_size=n, steps=1, noise_multiplier=0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with dpoptim.attach(
        plan,
        model,
        optimizer,
        data,
        collate_fn=collate,
        loss=losses if checked else None,
        noise_seed=1,
    ) as private:
        for batch in private.batches(fixed_shape=True, **batches):
            private.backward(losses(model, batch))
            optimizer.step()
    after = [p.detach() for p in model.parameters()]
    moved = [n * (a - b).double().flatten() for a, b in zip(before, after, strict=True)]
    return torch.cat(moved), private


def by_size(rows: Records) -> Any:
    return stacked(sorted(rows, key=lambda row: -float(row[0].sum())))


def by_label(rows: Records) -> Any:
    return stacked(sorted(rows, key=lambda row: int(row[1])))


def last_first(rows: Records) -> Any:
    return stacked(rows[::-1])


def last_class_first(rows: Records) -> Any:
    """Nothing that made-up labels, 0 and 1, would show."""
    return stacked(sorted(rows, key=lambda row: int(row[1]) < 2))


def shuffled(rows: Records) -> Any:
    return stacked([rows[i] for i in torch.randperm(len(rows))])


@pytest.mark.parametrize("collate", [by_size, by_label, last_first, last_class_first, shuffled])
@pytest.mark.parametrize("batches", [{}, {"physical_batch_size": 30}], ids=["whole", "cut"])
def test_what_moves_records_to_other_slots_is_refused(
    collate: Collate, batches: dict[str, Any]
) -> None:
    """The neighbours' sums of these differed by twice the clip norm."""
    with pytest.raises(dpoptim.PrivacyError, match="sorts or shuffles records"):
        summed(records(), collate, **batches)


def test_by_a_worker_too() -> None:
    with pytest.raises(dpoptim.PrivacyError, match="sorts or shuffles records"):
        summed(records(), last_class_first, num_workers=1)


def padded(rows: Records) -> Any:
    x = [F.pad(row[0], (0, LONGEST - FEATURES)) for row in rows]
    return pad_sequence(x, batch_first=True)[:, :FEATURES], torch.stack([row[1] for row in rows])


def features_first(rows: Records) -> Any:
    x, y = stacked(rows)
    return x.T.contiguous().T, y


def at_places(rows: Records) -> Any:
    """With what depends on the place alone, as the edges of graphs do."""
    x, y = stacked(rows)
    return x, y, torch.arange(len(rows)) * 10


def popping(rows: Any) -> Any:
    rows = [list(row) for row in rows]
    y = torch.stack([row.pop() for row in rows])
    return torch.stack([row.pop() for row in rows]), y


def drawing(rows: Records) -> Any:
    x, y = stacked(rows)
    return x * torch.bernoulli(torch.full_like(x, 0.9)), y


def drawing_by_python(rows: Records) -> Any:
    x, y = stacked(rows)
    return x * random.uniform(0.9, 1.1), y


def computed(rows: Records) -> Any:
    x, y = stacked(rows)
    return x.exp().log(), y


HONEST = (padded, features_first, at_places, popping, computed, default_collate)


@pytest.mark.parametrize("collate", [*HONEST, drawing, drawing_by_python])
def test_what_leaves_records_in_their_slots_is_taken(collate: Collate) -> None:
    moved = [summed(some, collate)[0] for some in (records(), records()[:-1])]
    if collate in HONEST:
        assert float((moved[0] - moved[1]).norm()) <= 1 + 1e-6
    _, private = summed(records(), collate)
    assert SAME_IF_COLLATED_SO in private.basis
    assert [item.kind for item in private.basis if item.text.startswith(SAME)] == ["trusted"]


@pytest.mark.parametrize(("collate", "checked"), [(None, False), (None, True), (stacked, True)])
def test_the_place_is_enforced_where_collating_was_checked(
    collate: Collate | None, checked: bool
) -> None:
    _, private = summed(records(), collate, checked=checked)
    found = [item for item in private.basis if item.text.startswith(SAME)]
    assert [(item.kind, item.text) for item in found] == [("enforced", SAME)]


@pytest.mark.parametrize(("collate", "kind"), [(None, "enforced"), (padded, "trusted")])
def test_a_certificate_tells_of_slots_either_way(collate: Collate | None, kind: str) -> None:
    """What batches may outgrow is taken off delta where one is read back."""
    _, private = summed(records(), collate)
    basis: dict[str, list[str]] = {"enforced": [], "trusted": [], "unproven": []}
    assert not had_slots(basis)
    for item in private.basis:
        basis[item.kind].append(item.text)
    assert had_slots({**basis, "unproven": []})
    assert any(text.startswith(SAME) for text in basis[kind])
