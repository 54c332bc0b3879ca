"""What newcomers do to a Trainer is served, or refused by name before anything is charged."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset, TensorDataset

import dpoptim
from integrations.small_language import Bag, Sentences, collate

lightning = pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")

from dpoptim.integrations import loaders  # noqa: E402
from dpoptim.integrations import transformers as of_transformers  # noqa: E402
from dpoptim.integrations.lightning import PrivateCallback  # noqa: E402
from dpoptim.integrations.transformers import PrivateTrainer  # noqa: E402
from dpoptim.integrations.transformers_options import (  # noqa: E402
    fit_to_plan,
    takes_checkpoints,
    uploads_checkpoints,
    with_steps_of,
)

pytestmark = pytest.mark.filterwarnings("ignore")
DATA = TensorDataset(torch.randn(20, 3), torch.randint(2, (20,)))
PUBLIC = DataLoader(TensorDataset(*DATA[:4]), 2)


def plan(steps: int = 4, n: int = 20, **options: Any) -> dpoptim.Plan:
    return dpoptim.DPSGD(clip_norm=1.0).plan(
        n=n, batch_size=n // 4, steps=steps, epsilon=4.0, delta=1e-3, **options
    )


def test_a_tracker_that_cannot_be_read_is_taken_to_take_checkpoints() -> None:
    base = transformers.TrainerCallback
    assert not takes_checkpoints(base)
    unknown = type("Unknown", (base,), {"on_save": len})  # without a source
    assert "cannot be read" in takes_checkpoints(unknown)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_train_epochs": 5}, True),
        ({"num_train_epochs": 1}, False),  # four batches of a quarter
        ({"num_train_epochs": 5, "max_steps": 4}, False),
        ({}, False),
    ],
)
def test_epochs_that_are_not_the_plans_are_named(
    options: dict[str, Any], told: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    warnings.simplefilter("always")
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)
    assert with_steps_of(plan(), args).max_steps == 4
    assert any("the plan's 4 steps count" in str(each.message) for each in recwarn) == told


class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        self.net, self.automatic_optimization = torch.nn.Linear(3, 2), automatic

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y, reduction="none")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Clips(Module):
    def configure_gradient_clipping(self, *args: Any) -> None:
        raise AssertionError


class Unfreezes(lightning.callbacks.BaseFinetuning):  # type: ignore[name-defined, misc]
    def freeze_before_training(self, module: Module) -> None:
        module.net.weight.requires_grad_(False)

    def finetune_function(self, module: Module, epoch: int, optimizer: Any) -> None:
        raise AssertionError


class Rests(lightning.Callback):  # type: ignore[name-defined, misc]
    """As the refusal of `Unfreezes` has it."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, module: Module, batch: Any, index: int) -> None:
        self.weights.append(module.net.weight.detach().clone())
        module.net.weight.requires_grad_(trainer.current_epoch >= 1)


class NoLoss(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"losses": 0}


class OwnLoader(Module):
    batch_size = 5

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, 5)


def fit(
    module: Module, folder: Path, *loaders: Any, more: tuple[Any, ...] = (), **options: Any
) -> tuple[PrivateCallback, dpoptim.Ledger]:
    ledger = dpoptim.Ledger(epsilon=8.0, delta=1e-2)
    callback = PrivateCallback(plan(), DATA, ledger=ledger)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[callback, *more],
        **{"max_epochs": 1, "enable_checkpointing": False, **options},
    )  # fmt: skip
    try:
        trainer.fit(module, *[callback.loader if each == "private" else each for each in loaders])
    finally:
        assert callback.private is not None or ledger.spent().epsilon == 0
    return callback, ledger


def done(callback: PrivateCallback) -> int:
    return 0 if callback.private is None else callback.private.steps_done


def lightning_mistakes() -> dict[str, tuple[Callable[[Path], Any], str]]:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    stops = (callbacks.EarlyStopping("train_loss"),)
    return {
        "own loader": (
            lambda p: fit(Module(), p, DataLoader(DATA, 5)),
            "private.loader.*return private.loader from train_dataloader, the datamodule's",
        ),
        "a loader in the module": (lambda p: fit(OwnLoader(), p), "private.loader"),
        "scores on the training data": (
            lambda p: fit(Module(), p, "private", DataLoader(DATA, 5)),
            "val_dataloaders reads the training data.*Fix",
        ),
        "scores on some of it": (
            lambda p: fit(Module(), p, "private", DataLoader(Subset(DATA, [3, 4]), 5)),
            "val_dataloaders reads the training data, or some of it.*Fix",
        ),
        "clipping in the module": (
            lambda p: fit(Clips(), p, "private"),
            "configure_gradient_clipping would find no gradients.*Fix",
        ),
        "scheduled accumulation": (
            lambda p: fit(
                Module(), p, "private", more=(callbacks.GradientAccumulationScheduler({1: 2}),)
            ),
            "GradientAccumulationScheduler.*Fix: leave it out",
        ),
        "a search for a learning rate": (
            lambda p: fit(OwnLoader(), p, more=(callbacks.LearningRateFinder(),)),
            "LearningRateFinder trains on the records without noise.*Fix: leave it out",
        ),
        "a search for a batch size": (
            lambda p: fit(OwnLoader(), p, more=(callbacks.BatchSizeFinder(),)),
            "BatchSizeFinder trains on the records.*Fix.*physical_batch_size",
        ),
        "what is frozen is to be unfrozen": (
            lambda p: fit(Module(), p, "private", more=(Unfreezes(),)),
            "Unfreezes would unfreeze.*'net.weight'.*Fix: .*on_train_batch_start",
        ),
        "stop by a private figure": (
            lambda p: fit(Module(), p, "private", more=stops),
            "EarlyStopping.*'train_loss'.*Fix: monitor a score on public",
        ),
        "though there are public ones": (
            lambda p: fit(Module(), p, "private", PUBLIC, more=stops),
            "EarlyStopping.*'train_loss'.*Fix: monitor a score on public",
        ),
        "no loss": (lambda p: fit(NoLoss(), p, "private"), "mapping without 'loss'. Fix"),
        "a method": (
            lambda p: PrivateCallback(dpoptim.DPSGD(clip_norm=1.0), DATA),  # type: ignore[arg-type]
            "plan must be a dpoptim.Plan, got DPSGD",
        ),
    }


@pytest.mark.parametrize("name", lightning_mistakes())
def test_lightning_names_what_cannot_be_kept_and_charges_nothing(name: str, tmp_path: Path) -> None:
    go, said = lightning_mistakes()[name]
    with pytest.raises((ValueError, TypeError), match=said):
        go(tmp_path)


def test_a_search_for_a_learning_rate_sees_no_record(tmp_path: Path) -> None:
    """Manual optimization would let it train by any loss."""

    class Manual(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("a record was seen")

        def train_dataloader(self) -> Any:
            return DataLoader(DATA, 5)

    tuning = pytest.importorskip("lightning.pytorch.tuner")
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, default_root_dir=tmp_path, enable_progress_bar=False,
        enable_checkpointing=False, callbacks=[PrivateCallback(plan(), DATA)],
    )  # fmt: skip
    with pytest.raises(ValueError, match="LearningRateFinder trains on the records"):
        tuning.Tuner(trainer).lr_find(Manual(automatic=False), num_training=3)


def test_lightning_serves_what_it_can(tmp_path: Path) -> None:
    stop = pytest.importorskip("lightning.pytorch.callbacks").EarlyStopping("val_loss")
    callback, ledger = fit(Module(), tmp_path, "private", PUBLIC, more=(stop,))
    assert done(callback) == 4
    spent = ledger.spent().epsilon
    assert spent > 0
    with pytest.raises(dpoptim.PrivacyError, match="another charge. Fix: a new PrivateCallback"):
        lightning.Trainer(
            accelerator="cpu", logger=False, callbacks=[callback], enable_checkpointing=False,
            default_root_dir=tmp_path, enable_progress_bar=False,
        ).fit(Module(), callback.loader)  # fmt: skip
    assert ledger.spent().epsilon == spent
    callback, _ = fit(Module(), tmp_path)  # without a loader
    assert done(callback) == 4
    with pytest.warns(UserWarning, match="after 2 of the plan's 4 steps"):
        fit(Module(), tmp_path, "private", max_steps=2)


def test_what_is_to_rest_at_first_does(tmp_path: Path) -> None:
    """An epoch is four steps, which the plan has twice."""
    rests = Rests()
    longer = PrivateCallback(plan(8), DATA)
    module = Module()
    lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, callbacks=[longer, rests], max_epochs=2,
        enable_checkpointing=False,
    ).fit(module, longer.loader)  # fmt: skip
    assert done(longer) == 8
    first, *later = rests.weights[:5]
    assert all(torch.equal(first, each) for each in later)
    assert not torch.equal(first, rests.weights[5])


def test_a_finetuning_that_freezes_nothing_at_first_is_served(tmp_path: Path) -> None:
    class Freezes(lightning.callbacks.BaseFinetuning):  # type: ignore[name-defined, misc]
        def freeze_before_training(self, module: Module) -> None:
            pass

        def finetune_function(self, module: Module, epoch: int, optimizer: Any) -> None:
            module.net.weight.requires_grad_(epoch >= 1)

    callback, _ = fit(Module(), tmp_path, "private", more=(Freezes(),))
    assert done(callback) == 4


def test_a_datamodule_may_hand_out_the_loader(tmp_path: Path) -> None:
    class Data(lightning.LightningDataModule):  # type: ignore[name-defined, misc]
        def train_dataloader(self) -> Any:
            return callback.loader

        def val_dataloader(self) -> Any:
            return PUBLIC

    callback = PrivateCallback(plan(), DATA)
    lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, callbacks=[callback], max_epochs=1, enable_checkpointing=False,
    ).fit(Module(), datamodule=Data())  # fmt: skip
    assert done(callback) == 4


@pytest.mark.parametrize(
    "read", [lambda step: step[0], lambda step: len(step), lambda step: {**step}]
)
def test_a_step_is_no_batch(read: Callable[[Any], Any]) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, optimizer, DATA) as private:
        step = next(private.steps())
        assert step
        with pytest.raises(
            (dpoptim.PrivacyError, TypeError), match=r"no batch.*(?s:Fix:.*for batch in s)"
        ):
            read(step)
        assert len([*step]) == 1  # as nothing was delivered before


def test_a_step_taken_for_a_batch_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unpack") as raised:
        fit(Module(automatic=False), tmp_path, "private")
    assert "for batch in step" in raised.value.__notes__[0]


def arguments(folder: Path, **options: Any) -> Any:
    return transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=8, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", **options,
    )  # fmt: skip


def test_the_trainer_names_what_cannot_be_kept_and_charges_nothing(tmp_path: Path) -> None:
    data, ledger = Sentences(20), dpoptim.Ledger(epsilon=8.0, delta=1e-2)

    def train(of: Any, **options: Any) -> PrivateTrainer:
        scores = {"eval_dataset": data} if "eval_strategy" in options else {}
        trainer = PrivateTrainer(
            Bag(), arguments(tmp_path, **options), train_dataset=data, plan=of,
            data_collator=collate, ledger=ledger, **scores,
        )  # fmt: skip
        trainer.train()
        return trainer

    with pytest.raises(TypeError, match="plan must be a dpoptim.Plan, got DPSGD"):
        train(dpoptim.DPSGD(clip_norm=1.0))
    with pytest.raises(ValueError, match="auto_find_batch_size.*another charge. Fix"):
        train(plan(), auto_find_batch_size=True)
    with pytest.raises(ValueError, match="the plan's method does. Fix"):
        train(plan(), train_sampling_strategy="group_by_length")
    with pytest.raises(ValueError, match="neftune_noise_alpha scales.*Fix: leave it out"):
        train(plan(), neftune_noise_alpha=5.0)
    with pytest.raises(ValueError, match="eval_dataset is the training data"):
        train(plan(), eval_strategy="steps", eval_steps=1)
    assert ledger.spent().epsilon == 0
    trainer = train(plan())
    spent = ledger.spent().epsilon
    with pytest.raises(dpoptim.PrivacyError, match="another charge. Fix: train.resume_from"):
        trainer.train()
    assert ledger.spent().epsilon == spent > 0


class OwnPasses(PrivateTrainer):
    """As the Trainer of Transformers has it, whose loss is a mean over all tokens of a batch."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        for batch in inputs:
            loss: Tensor = model(**batch).loss
            loss.backward()
        return loss.detach()


class OneBatch(PrivateTrainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = model(**inputs).loss
        self.private.backward(loss)  # type: ignore[union-attr]
        return loss.detach()


class Counting(PrivateTrainer):
    seen = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self.seen += 1
        return super().training_step(model, inputs, num_items_in_batch)


class OwnBatches(PrivateTrainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)


class OwnOrder(PrivateTrainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)


def steps_unsealed() -> AbstractContextManager[Any]:
    """A bug: a step's records may be read by whoever overrides ``training_step``."""
    return patch.object(loaders.SealedStep, "__iter__", lambda self: iter(self.step))


def own_batches_unseen() -> AbstractContextManager[Any]:
    """A bug: nobody asks whether a subclass draws batches itself."""
    return patch.object(of_transformers, "refuse_own_batches", lambda trainer: None)


OWN: dict[str, tuple[type[PrivateTrainer], str, Callable[[], AbstractContextManager[Any]]]] = {
    "passes": (OwnPasses, "Fix: override per_sample_losses", steps_unsealed),
    "batches": (OwnBatches, "OwnBatches.get_train_dataloader would draw", own_batches_unseen),
    "order": (
        OwnOrder,
        "OwnOrder._get_train_sampler would draw.*Fix",
        own_batches_unseen,
    ),
}


def run_of(kind: type[PrivateTrainer], folder: Path, ledger: dpoptim.Ledger) -> Any:
    trainer = kind(
        Bag(), arguments(folder), train_dataset=Sentences(20), plan=plan(),
        data_collator=collate, ledger=ledger,
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.set_aside("order")
@pytest.mark.parametrize("name", OWN)
def test_a_trainer_that_does_a_part_of_it_itself_is_refused_before_the_charge(
    name: str, tmp_path: Path
) -> None:
    """With the seeded bug it is not: the refusal that is named is the one that stops it."""
    kind, said, bug = OWN[name]
    ledger = dpoptim.Ledger(epsilon=8.0, delta=1e-2)
    with pytest.raises((dpoptim.PrivacyError, ValueError), match=said):
        run_of(kind, tmp_path, ledger)
    assert ledger.spent().epsilon == 0
    with bug(), suppress(TypeError, AttributeError):  # as where a loader's items are no steps
        run_of(kind, tmp_path, ledger)
    assert kind is OwnBatches or ledger.spent().epsilon > 0


def test_a_training_step_is_not_given_a_batch_and_may_do_something_beside_it(
    tmp_path: Path,
) -> None:
    ledger = dpoptim.Ledger(epsilon=8.0, delta=1e-2)
    with pytest.raises(dpoptim.PrivacyError, match="Fix: override per_sample_losses"):
        run_of(OneBatch, tmp_path, ledger)
    assert ledger.spent().epsilon == 0
    assert run_of(Counting, tmp_path, ledger).seen == plan().steps


def test_a_stream_trains_in_the_trainer_and_leaves_its_options_alone(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Sentences(20).rows)

    options = arguments(tmp_path)
    given = dpoptim.DPFTRL(clip_norm=1.0, order="given").plan(
        n=20, batch_size=10, epochs=1, noise_multiplier=1.0, delta=1e-3, neighboring="zero-out"
    )
    trainer = PrivateTrainer(
        Bag(), options, train_dataset=Stream(), data_collator=collate, plan=given
    )
    trainer.train()
    assert trainer.state.global_step == given.steps
    assert options.max_steps == -1  # as they were, for another plan


def test_checkpoints_that_are_uploaded_must_be_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**options: Any) -> str:
        args = transformers.TrainingArguments("", use_cpu=True, **options)
        upload = uploads_checkpoints(args)
        if upload:
            with pytest.raises(ValueError, match="would upload.*Fix: .*checkpoint_key"):
                fit_to_plan(plan(), args, "", sealed=False)
        fit_to_plan(plan(), args, "", sealed=True)
        return upload

    assert not found(push_to_hub=True, report_to=["mlflow", "wandb"])
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    assert not found(report_to=["mlflow"])
    assert "WANDB_LOG_MODEL" in found(report_to=["wandb"])
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "TRUE")
    assert "HF_MLFLOW_LOG_ARTIFACTS" in found(report_to=["mlflow"])
    assert "CLEARML_LOG_MODEL" in found(report_to=["clearml"])  # unless it is switched off
    monkeypatch.setenv("CLEARML_LOG_MODEL", "FALSE")
    assert not found(report_to=["clearml"])
    monkeypatch.setenv("HF_DAGSHUB_LOG_ARTIFACTS", "1")
    assert "HF_DAGSHUB_LOG_ARTIFACTS" in found(report_to=["dagshub"])
    assert "no switch" in found(report_to=["flyte"])
    assert not found(report_to=["tensorboard", "azure_ml", "neptune", "trackio", "kubeflow"])
    assert "hub_strategy='checkpoint'" in found(push_to_hub=True, hub_strategy="checkpoint")
