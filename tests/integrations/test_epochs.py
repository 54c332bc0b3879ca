"""Loops and loggers count expected passes as epochs, also where batches change in size."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.integrations.loggers import PublicLogger
from integrations.small_language import Bag, Sentences, collate

DATA = TensorDataset(torch.randn(20, 3), torch.randint(2, (20,)))
EPOCHS = [0.5, 1.0, 1.25, 1.5, 1.75, 2.0]  # after each step


def plan() -> dpoptim.Plan:
    """Two steps make the first pass, four steps of half the batch the second."""
    method = dpoptim.DPSGD(clip_norm=1.0, batch_schedule=((2, 0.5),))
    return method.plan(n=20, batch_size=10, epochs=2, epsilon=8.0, delta=1e-3)


def uneven() -> dpoptim.Plan:
    """Three passes that are eight steps: two, three and three."""
    method = dpoptim.DPSGD(clip_norm=1.0)
    return method.plan(n=20, batch_size=8, epochs=3, noise_multiplier=1.0, delta=1e-3)


def test_loggers_count_passes() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[float] = []

    def sink(figures: Mapping[str, float], step: int) -> None:
        found.append(figures["epoch"])

    with dpoptim.attach(plan(), model, optimizer, DATA) as private:
        logger = PublicLogger(private, sink)
        for x, y in private.batches():
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            logger.log()
    assert found == EPOCHS


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_counts_passes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from dpoptim.integrations.transformers import PrivateTrainer

    options = transformers.TrainingArguments(
        output_dir=str(tmp_path), logging_steps=1, save_strategy="no", use_cpu=True,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    run = PrivateTrainer(
        Bag(), options, train_dataset=Sentences(20), data_collator=collate, plan=plan()
    )
    run.train()
    found = {entry["step"]: entry["epoch"] for entry in run.state.log_history}
    assert found == dict(enumerate(EPOCHS, 1))


class Ends(list[tuple[int, float]]):
    """Epochs as a callback of the Trainer sees them end; stops at a step."""

    def callback(self, last: int = 0) -> Any:
        from transformers import TrainerCallback

        seen = self

        class Callback(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                control.should_training_stop |= state.global_step == last

            def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                seen.append((state.global_step, state.epoch))

        return Callback()


@pytest.mark.filterwarnings("ignore")
def test_epochs_of_the_trainer_are_the_plans_also_where_it_goes_on_in_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from dpoptim.integrations.transformers import PrivateTrainer

    ledger = dpoptim.Ledger(tmp_path / "ledger")

    def train(last: int, *, resume: bool = False, **options: Any) -> tuple[Any, Ends]:
        of = transformers.TrainingArguments(
            output_dir=str(tmp_path), save_strategy="epoch", use_cpu=True, report_to=[],
            disable_tqdm=True, **options,
        )  # fmt: skip
        ends = Ends()
        run = PrivateTrainer(
            Bag(), of, train_dataset=Sentences(20), data_collator=collate, plan=uneven(),
            callbacks=[ends.callback(last)], ledger=ledger,
        )  # fmt: skip
        run.train(resume_from_checkpoint=resume or None)
        return run, ends

    run, ends = train(4, eval_strategy="no")
    assert (run.state.num_train_epochs, run.args.num_train_epochs) == (3, 3)
    assert ends == [(2, 1.0), (4, 1 + 2 / 3)]
    run, ends = train(0, resume=True)
    assert ends == [(5, 2.0), (8, 3.0)]
    assert run.private.steps_done == uneven().steps == 8
    assert len(ledger.entries()) == 1
    run, ends = train(0, max_steps=3)
    assert run.state.num_train_epochs == 2
    assert ends == [(2, 1.0), (3, 1 + 1 / 3)]


@pytest.mark.filterwarnings("ignore")
def test_the_best_of_the_epochs_is_kept_and_the_run_stops_early(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from dpoptim.integrations.transformers import PrivateTrainer

    options = transformers.TrainingArguments(
        output_dir=str(tmp_path), eval_strategy="epoch", save_strategy="epoch", use_cpu=True,
        load_best_model_at_end=True, report_to=[], disable_tqdm=True, learning_rate=0.0,
    )  # fmt: skip
    run = PrivateTrainer(
        Bag(), options, train_dataset=Sentences(20), eval_dataset=Sentences(4),
        data_collator=collate, plan=uneven(),
        callbacks=[transformers.EarlyStoppingCallback(1)],
    )  # fmt: skip
    run.train()
    scored = [
        (each["step"], each["epoch"]) for each in run.state.log_history if "eval_loss" in each
    ]
    assert scored == [(2, 1.0), (5, 2.0)]
    assert run.private.steps_done == 5
    assert str(run.state.best_model_checkpoint).endswith("checkpoint-2")


@pytest.mark.filterwarnings("ignore")
def test_as_many_epochs_in_lightning_as_in_the_plan_are_all_of_it(tmp_path: Path) -> None:
    """By the first batch's size there would be two steps an epoch, and two of six left over."""
    lightning = pytest.importorskip("lightning.pytorch")
    from dpoptim.integrations.lightning import PrivateCallback

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    callback = PrivateCallback(plan(), DATA)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, callbacks=[callback], max_epochs=round(plan().epochs),
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Module(), callback.loader)
    assert trainer.global_step == plan().steps == 6
    assert len(callback.loader) == 3


def test_as_many_passes_of_a_loader_as_the_plan_has_epochs_are_all_of_it() -> None:
    from dpoptim.integrations.loaders import PlanLoader

    method = dpoptim.DPSGD(clip_norm=1.0)
    hundred = method.plan(n=100, batch_size=3, epochs=3, noise_multiplier=1.0, delta=1e-3)
    assert len(PlanLoader(hundred)) * 3 >= hundred.steps == 100
