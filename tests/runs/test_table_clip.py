"""The default clip norm of a table's linear classifier: as long as a record usually is."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpoptim.accounting.ledger import Ledger
from dpoptim.data import Data
from dpoptim.runs.command import parameters_of, planned_run
from dpoptim.runs.inputs import load_data
from dpoptim.runs.models import build_model
from dpoptim.runs.options import TrainRequest
from dpoptim.runs.plans import usual_length
from dpoptim.runs.train import train_privately

SCHEMA = """scaling = "{}"
[columns.size]
kind = "number"
bounds = [-10, 10]
[columns.age]
kind = "number"
bounds = [-10, 10]
[columns.ward]
kind = "category"
categories = ["0", "1", "2"]
[columns.outcome]
kind = "target"
classes = ["0", "1", "2"]
"""


def table(folder: Path, n: int, seed: int, scaling: str = "bounds") -> TrainRequest:
    """Classes of 81, 13 and 6 % or so, of which the columns tell a little."""
    rng = np.random.default_rng(seed)
    x, ward = rng.normal(size=(n, 2)), rng.integers(0, 3, n)
    scores = np.column_stack([np.full(n, 2.0), 0.6 * x[:, 0] + 0.6 * (ward == 1), 0.6 * x[:, 1]])
    scores[:, 2] -= 0.8
    scores += rng.gumbel(size=scores.shape)
    rows = np.column_stack([x, ward, scores.argmax(1)])
    path, schema = folder / f"{seed}.csv", folder / "schema.toml"
    np.savetxt(
        path,
        rows,
        delimiter=",",
        header="size,age,ward,outcome",
        comments="",
        fmt=["%.4f", "%.4f", "%d", "%d"],
    )
    schema.write_text(SCHEMA.format(scaling))
    return TrainRequest(data=str(path), schema=schema, epsilon=1.0, delta=1e-6)


def test_it_follows_the_schema_and_no_record(tmp_path: Path) -> None:
    for scaling, expected in (
        ("bounds", math.sqrt(1 + 1 + 2 / 6)),
        ("unit-norm", math.sqrt(2)),
        ("none", 1.0),
    ):
        lengths = set()
        for seed in (1, 2):
            request = table(tmp_path, 600, seed, scaling)
            data = load_data(request)
            lengths.add(usual_length(data))
            plan, optimization = planned_run(request, data, None, 1)
            assert plan.method.clip_norm == usual_length(data)
            assert optimization.chosen_for == plan.method.clip_norm
            asked, _ = planned_run(replace(request, clip_norm=0.7), data, None, 1)
            assert asked.method.clip_norm == 0.7
        assert len(lengths) == 1
        assert lengths.pop() == pytest.approx(expected, rel=0.03)


def log_loss(request: TrainRequest, data: Data, test: Data) -> tuple[float, np.ndarray]:
    """On new records; and the mean probability of each class."""
    torch.manual_seed(0)
    model = build_model("softmax", data.x.shape[1:], data.outputs)
    plan, optimization = planned_run(request, data, None, parameters_of(model))
    trained = train_privately(
        data,
        model,
        plan,
        optimization,
        ledger=Ledger(neighboring=plan.neighboring),
        label="made up",
        noise_seed=1,
        on_step=lambda _: None,
    )
    with torch.no_grad():
        found = torch.log_softmax(trained.model(torch.from_numpy(test.x)).double(), -1).numpy()
    return float(-found[np.arange(len(test.y)), test.y].mean()), np.exp(found).mean(0)


@pytest.mark.figures
def test_rare_classes_are_as_likely_as_they_are(tmp_path: Path) -> None:
    """With a clip norm that cuts what a model is wrong about, a constant is better."""
    request = table(tmp_path, 3_000, 1)
    data, test = load_data(request), load_data(table(tmp_path, 3_000, 2))
    share = np.bincount(data.y, minlength=3) / len(data.y)
    constant = float(-np.log(share)[test.y].mean())
    loss, likely = log_loss(request, data, test)
    assert loss < constant
    short, too_sure = log_loss(replace(request, clip_norm=0.5), data, test)
    assert loss < short
    assert abs(likely - share)[0] < abs(too_sure - share)[0]
