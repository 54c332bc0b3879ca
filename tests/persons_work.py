"""What the ranks of tests/distributed/test_persons.py do: two worlds that differ in one person."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import dpoptim
from distributed_work import caught
from dpoptim.estimators import DPLogisticRegression, DPSGDClassifier, shards
from dpoptim.training import agreed

FEATURES, MOST, ANN = 6, 3, 7  # the person who differs
BATCH, CLIP = 20, 0.7


def rows(world: int) -> tuple[np.ndarray, np.ndarray]:
    """Features, and the owner of each row, 2 to 5 of whom are each person's; Ann's rows differ."""
    draws = np.random.default_rng(3)
    owners = np.repeat(np.arange(24), draws.integers(2, 6, 24))
    draws.shuffle(owners)
    x = draws.normal(size=(len(owners), FEATURES))
    x[owners == ANN] = -5.0 if world else 5.0
    return x, owners


def own(rank: int, size: int, owners: np.ndarray, how: str) -> np.ndarray:
    """Which rows this rank has: all, its persons', or whoever's they are."""
    if how == "whole":
        return np.arange(len(owners))
    by = owners if how == "persons" else np.arange(len(owners))
    return np.flatnonzero(by % size == rank)


def attached(rank: int, size: int, how: str, world: int) -> np.ndarray:
    """The sum of clipped gradients of everybody's rows, without noise: the step of SGD at rate 1,
    by which a linear model moves.
    """
    x, owners = rows(world)
    mine = own(rank, size, owners, how)
    model = torch.nn.Linear(FEATURES, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    plan = dpoptim.DPSGD(clip_norm=CLIP).plan(
        n=24, batch_size=24, steps=1, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.from_numpy(x[mine]))
    with dpoptim.attach(
        plan,
        model,
        optimizer,
        data,
        persons=owners[mine].tolist(),
        rows_per_record=MOST,
        sharded=how != "whole",
        noise_seed=1,
    ) as private:
        for (batch,) in private.batches():
            private.backward(model(batch)[:, 0])
            optimizer.step()
        basis = " ".join(each.text for each in private.basis)
    assert (how == "whole") != ("no person has rows in the data sets of two" in basis)
    return model.weight.detach().numpy().ravel() * 24 / CLIP


def linear(rank: int, size: int, how: str, world: int) -> np.ndarray:
    """The same of a linear estimator: one step of full-batch descent, with noise that repeats."""
    x, owners = rows(world)
    mine = own(rank, size, owners, how)
    fit = DPLogisticRegression(
        5.0,
        1e-5,
        data_norm=1.0,
        classes=[0, 1],
        fit_intercept=False,
        solver="noisy-gd",
        steps=1,
        step_size=1.0,
        clip_norm=0.1,
        sharded=how != "whole",
        rows_per_person=MOST,
        noise_seed=1,
    ).fit(x[mine], (rows(0)[0][mine, 0] > 0).astype(int), persons=owners[mine])
    assert fit.privacy_.unit == "person"
    said = " ".join(fit.privacy_.notes)
    assert (how == "whole") != ("no person has rows in two of their tables" in said)
    of_ranks = (
        [own(other, size, owners, how) for other in range(size)] if how != "whole" else [mine]
    )
    counted = sum(len(np.unique(owners[each])) for each in of_ranks)  # the mean is over these
    return np.ravel(fit.coef_) * counted / 0.1


WAYS: dict[str, Callable[[int, int, str, int], np.ndarray]] = {
    "attached": attached,
    "linear": linear,
}


def difference(rank: int, way: str, how: str) -> float:
    """By how much the sum over all ranks moves with one person, in clip norms."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    one, other = (WAYS[way](rank, size, how, world) for world in (0, 1))
    return float(np.linalg.norm(one - other))


def differences(rank: int) -> dict[tuple[str, str], float]:
    """Of every way with data that keeps persons together."""
    return {(way, how): difference(rank, way, how) for way in WAYS for how in ("whole", "persons")}


def refused(rank: int) -> dict[str, str]:
    """What is said where somebody's rows lie in two shards, or ranks name persons otherwise."""
    x, owners = rows(0)
    size = dist.get_world_size()

    def fit(estimator: Any, names: Any, mine: Any) -> Callable[[], Any]:
        return lambda: estimator.fit(x[mine], (x[mine, 0] > 0).astype(int), persons=names)

    mine, each = own(rank, size, owners, "persons"), slice(None)
    sharded = DPLogisticRegression(classes=[0, 1], sharded=True)
    whole = DPLogisticRegression(classes=[0, 1])
    named = owners.astype(str) if rank else owners
    others = np.roll(owners, 1) if rank else owners
    network = DPSGDClassifier(classes=[0, 1], random_state=0, epochs=1, noise_seed=1)
    return {
        **{f"{way} split": caught(lambda way=way: difference(rank, way, "split")) for way in WAYS},
        "names and numbers in shards": caught(fit(sharded, named[mine], mine)),
        "other owners": caught(fit(whole, others, each)),
        "other owners in a network": caught(fit(network, others, each)),
        "persons on one rank": caught(fit(whole, owners if rank else None, each)),
    }


def unchecked(rank: int) -> dict[str, float]:
    """`difference` of split persons under the bug that nobody looks where their rows are."""
    found = {}
    for way in WAYS:
        module = agreed if way == "attached" else shards
        with patch.object(module, "one_rank_a_person", lambda *a, **k: nullcontext()):
            found[way] = difference(rank, way, "split")
    return found
