"""The objective: the same sums however the data arrive, and no way to read it by accident."""

import numpy as np
import pytest
import torch

from dpoptim.errors import PrivacyError
from dpoptim.solvers import LinearProblem, Objective
from dpoptim.solvers.linear_model import LinearModel
from solving import FEATURES, logistic, records


def test_chunks_arrays_and_memory_maps_give_the_same_sums(tmp_path) -> None:
    x, y = records()
    np.save(tmp_path / "x.npy", x.numpy())
    np.save(tmp_path / "y.npy", y.numpy())
    mapped = tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy")
    problem = LinearProblem(LinearModel("logistic", features=FEATURES), capacity=len(x))
    w, v = torch.randn(2, FEATURES + 1, dtype=torch.float64)
    for terms in ([(1.0, w)], [(1.0, w), (-1.0, v)]):
        whole = Objective(problem, (x, y), chunk=1000).clipped_sum(terms, 0.5)
        for data, chunk in [
            ((x, y), 7),
            ((x.numpy(), y.numpy()), 64),
            (mapped, 33),
            ((x.numpy(), list(y.tolist())), 200),
        ]:
            torch.testing.assert_close(
                Objective(problem, data, chunk=chunk).clipped_sum(terms, 0.5), whole
            )


def test_the_risk_of_private_data_is_not_shown_by_accident() -> None:
    objective = logistic()
    with pytest.raises(PrivacyError, match="private"):
        objective.risk(objective.problem.initial(), data_is_public=False)
    assert objective.risk(objective.problem.initial(), data_is_public=True) == pytest.approx(
        np.log(2)
    )


def test_n_must_be_public() -> None:
    with pytest.raises(ValueError, match="would make n private"):
        logistic(neighboring="add-or-remove-one")


def test_unequal_or_empty_data_are_refused() -> None:
    x, y = records()
    problem = LinearProblem(LinearModel("logistic", features=FEATURES), capacity=len(x))
    for data in ((x, y[:-1]), (x[:0], y[:0])):
        with pytest.raises(ValueError, match="arrays of one length"):
            Objective(problem, data)


def test_more_records_than_the_proof_covers_are_refused() -> None:
    x, y = records()
    problem = LinearProblem(LinearModel("logistic", features=FEATURES), capacity=len(x) - 1)
    with pytest.raises(ValueError, match="capacity of 199 records is below n=200"):
        Objective(problem, (x, y))
