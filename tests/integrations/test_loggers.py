"""Loggers get public figures, and refuse all others before anything is written."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.integrations.loggers import PublicLogger, Sink, to_mlflow, to_tensorboard


def logged(sink: Sink, scores: dict[str, Any], **options: Any) -> dpoptim.PrivateTraining:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(clip_norm=0.5).plan(n=40, batch_size=10, steps=3, epsilon=8.0, delta=1e-4)
    data = TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
    with dpoptim.attach(plan, model, optimizer, data) as private:
        logger = PublicLogger(private, sink, **options)
        for x, y in private.batches():
            losses = F.cross_entropy(model(x), y, reduction="none")
            private.backward(losses)
            optimizer.step()
            logger.log(scores)
    return private


def test_tensorboard_shows_steps_of_the_plan(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        private = logged(to_tensorboard(writer), {"eval_accuracy": torch.tensor(0.5)})
    found = reading.EventAccumulator(str(tmp_path)).Reload()
    names = {"epsilon_reserved", "clip_norm", "noise_std", "epoch", "eval_accuracy"}
    assert set(found.Tags()["scalars"]) == names
    assert [(e.step, e.value) for e in found.Scalars("clip_norm")] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    epsilon = found.Scalars("epsilon_reserved")[0].value
    assert epsilon == pytest.approx(private.spent().epsilon)


def test_mlflow_shows_steps_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # all that mlflow-skinny can write
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with mlflow.start_run() as run:
        private = logged(to_mlflow(mlflow), {"temperature": 0.3}, public_figures=["temperature"])
        with pytest.raises(dpoptim.PrivacyError, match="'loss' is not known to be public"):
            PublicLogger(private, to_mlflow(mlflow)).log({"loss": 0.7})
    client = mlflow.MlflowClient()
    names = {"epsilon_reserved", "clip_norm", "noise_std", "epoch", "temperature"}
    assert set(client.get_run(run.info.run_id).data.metrics) == names
    found = client.get_metric_history(run.info.run_id, "clip_norm")
    assert [(metric.step, metric.value) for metric in found] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    epsilon = client.get_metric_history(run.info.run_id, "epsilon_reserved")[0].value
    assert epsilon == pytest.approx(private.spent().epsilon)


@pytest.mark.parametrize("name", ["loss", "train_loss", "accuracy", "grad_norm", "Eval_loss"])
def test_other_figures_are_refused_and_nothing_is_written(name: str) -> None:
    calls: list[Any] = []
    with pytest.raises(dpoptim.PrivacyError, match=f"'{name}' is not known to be public.*Fix"):
        logged(lambda figures, step: calls.append(figures), {"eval_loss": 1.0, name: 1.0})
    assert not calls


def test_the_guide_names_all_that_is_written_by_itself() -> None:
    written: list[set[str]] = []
    logged(lambda figures, step: written.append(set(figures)), {})
    guide = (Path(__file__).parents[2] / "docs/guides/own-loop.md").read_text(encoding="utf-8")
    said = guide.split("`PublicLogger` writes", 1)[1].split(" by itself", 1)[0]
    assert set(said.split("`")[1::2]) == written[-1]
