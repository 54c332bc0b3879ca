"""Trainer, Lightning, Accelerate and a plain loop: one plan, one seed, the same released
weights.
"""

import contextlib
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpoptim
from integrations.small_language import (
    Bag,
    Sentences,
    adapted,
    causal,
    classifier,
    collate,
    plan,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
lightning = pytest.importorskip("lightning.pytorch")
accelerate = pytest.importorskip("accelerate")

from dpoptim.integrations.language import losses_from_labels  # noqa: E402
from dpoptim.integrations.lightning import PrivateCallback  # noqa: E402
from dpoptim.integrations.transformers import PrivateTrainer  # noqa: E402

pytestmark = pytest.mark.usefixtures("tried_once")
Weights = dict[str, Tensor]
TASKS: dict[str, tuple[Callable[[], Any], bool]] = {
    "classification": (classifier, False),
    "causal LM": (causal, True),
    "LoRA": (adapted, True),
    "tokens": (Bag, False),
}


def stops() -> list[Any]:
    """For each task a step to stop after: the first, the last, and one drawn from those between."""
    steps = plan(6).steps
    between = random.Random(24).randint(2, steps - 1)
    return [
        ("tokens", between),
        pytest.param("classification", between, marks=pytest.mark.variants),
        pytest.param("causal LM", steps, marks=pytest.mark.variants),
        pytest.param("LoRA", 1, marks=pytest.mark.variants),
    ]


def weights(model: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def plain(
    model: nn.Module,
    data: Sentences,
    physical: int | None,
    *,
    save: Path | None = None,
    stop: int = 10**9,
    kept: bool = False,
    **options: Any,
) -> Weights:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dpoptim.attach(
        plan(6),
        model,
        optimizer,
        data,
        loss=losses_from_labels,
        collate_fn=collate,
        noise_seed=5,
        **options,
    ) as private:
        for step in private.steps(physical_batch_size=physical):
            for batch in step:
                private.backward(losses_from_labels(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if private.steps_done == stop:
                break
        if save is not None:
            private.save(save)
    if kept:
        private.swap_random_iterate()
    return weights(model)


@cache
def in_one_go(task: str) -> Weights:
    """What a plain loop ends with that is not interrupted."""
    make, language_model = TASKS[task]
    return plain(make(), Sentences(language_model=language_model), None)


def training_arguments(folder: Path, physical: int, **options: Any) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=physical,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", "logging_steps": 2, **options},
    )


def trainer(
    model: Any,
    data: Sentences,
    folder: Path,
    physical: int,
    public: tuple[str, ...] = (),
    points: dict[str, Any] | None = None,
    **options: Any,
) -> PrivateTrainer:
    return PrivateTrainer(
        model,
        training_arguments(folder, physical, **options),
        train_dataset=data,
        data_collator=collate,
        optimizers=(
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5),
            None,
        ),
        plan=plan(6),
        noise_seed=5,
        public_figures=public,
        **(points or {}),
    )


class OwnLoss(PrivateTrainer):
    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
        raise AssertionError


class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
    def __init__(self, model: Any, automatic: bool = True) -> None:
        super().__init__()
        self.model, self.automatic_optimization = model, automatic

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return losses_from_labels(self.model, batch)
        for microbatch in batch:
            self.private.backward(losses_from_labels(self.model, microbatch))
        self.optimizers().step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def by_lightning(
    model: Any,
    data: Sentences,
    folder: Path,
    physical: int,
    *,
    automatic: bool = True,
    resume: Path | None = None,
    points: dict[str, Any] | None = None,
    **trainer: Any,
) -> tuple[Weights, Any]:
    callback = PrivateCallback(
        plan(6),
        data,
        physical_batch_size=physical,
        collate_fn=collate,
        noise_seed=5,
        **(points or {}),
    )
    options = {"max_epochs": 2, "enable_checkpointing": False, **trainer}
    fit = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[callback, *options.pop("more", [])],
        **options,
    )
    fit.fit(
        Module(model, automatic), callback.loader, ckpt_path=None if resume is None else str(resume)
    )
    return weights(model), fit


def by_accelerate(
    model: Any,
    data: Sentences,
    physical: int | None,
    *,
    save: Path | None = None,
    stop: int = 10**9,
    **options: Any,
) -> Weights:
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)  # the usual order
    with dpoptim.attach(
        plan(6),
        model,
        optimizer,
        data,
        loss=losses_from_labels,
        collate_fn=collate,
        noise_seed=5,
        **options,
    ) as private:
        for step in private.steps(physical_batch_size=physical):
            for batch in step:
                with accelerator.accumulate(model):
                    private.backward(losses_from_labels(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
            if private.steps_done == stop:
                break
        if save is not None:
            private.save(save)
    return weights(model)


def close(ours: Weights, theirs: Weights) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.set_aside("LoRA-True")
@pytest.mark.filterwarnings("ignore")  # other libraries' own
@pytest.mark.parametrize(
    ("task", "once"),
    [
        ("tokens", False),
        ("LoRA", True),
        *(pytest.param(t, False, marks=pytest.mark.variants) for t in TASKS if t != "tokens"),
    ],
)
def test_every_loop_releases_the_same_weights(task: str, once: bool, tmp_path: Path) -> None:
    """Each loop once, or with batches cut up and whole."""
    make, language_model = TASKS[task]
    data = Sentences(language_model=language_model)
    start = weights(make())
    expected = in_one_go(task)
    assert any(not torch.equal(start[name], expected[name]) for name in start)
    close(expected, plain(make(), data, 4))
    for physical in (4, 100)[: 1 if once else 2]:
        model = make()
        trainer(model, data, tmp_path / f"trainer{physical}", physical).train()
        close(expected, weights(model))
    for physical in (4, None)[: 1 if once else 2]:
        close(expected, by_accelerate(make(), data, physical))
    for automatic, physical in ((True, 4), (False, 100))[: 1 if once else 2]:
        found, fit = by_lightning(make(), data, tmp_path, physical, automatic=automatic)
        assert fit.global_step == plan(6).steps
        close(expected, {name.removeprefix("model."): value for name, value in found.items()})


@pytest.mark.variants
@pytest.mark.filterwarnings("ignore")
def test_every_loop_keeps_to_a_ball_and_keeps_the_same_point(tmp_path: Path) -> None:
    points = {"projection": 0.05, "random_iterate": True}
    data = Sentences(language_model=False)
    start, last = weights(Bag()), plain(Bag(), data, None, **points)
    free = in_one_go("tokens")
    kept = plain(Bag(), data, None, kept=True, **points)
    for found, inside in ((last, True), (kept, True), (free, False)):
        moves = [(found[name] - start[name]).flatten() for name in start]
        assert (float(torch.cat(moves).norm()) <= 0.05 * (1 + 1e-5)) == inside
    assert any(not torch.equal(last[name], kept[name]) for name in last)

    model = Bag()
    ours = trainer(model, data, tmp_path, 4, points=points)
    ours.train()
    close(last, weights(model))
    ours.private.swap_random_iterate()
    close(kept, weights(model))

    model = Bag()
    found, fit = by_lightning(model, data, tmp_path, 4, points=points)
    close(last, {name.removeprefix("model."): value for name, value in found.items()})
    (callback,) = (each for each in fit.callbacks if isinstance(each, PrivateCallback))
    callback.private.swap_random_iterate()
    close(kept, {name.removeprefix("model."): value for name, value in weights(model).items()})
    fit.save_checkpoint(tmp_path / "kept.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "kept.ckpt", weights_only=False)["state_dict"]
    close(kept, {name.removeprefix("model."): value for name, value in saved.items()})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("task", "stop"), stops())
def test_every_loop_resumes_to_the_same_weights(task: str, stop: int, tmp_path: Path) -> None:
    """As those of the run that was not interrupted: a seeded one goes on in its streams."""
    make, language_model = TASKS[task]
    data = Sentences(language_model=language_model)
    expected = in_one_go(task)
    ledger = dpoptim.Ledger(tmp_path / "plain.sqlite")
    file = tmp_path / "plain.checkpoint"
    interrupted = make()
    plain(interrupted, data, None, save=file, stop=stop, ledger=ledger)
    close(expected, plain(interrupted, data, 4, resume=file, ledger=ledger))

    file = tmp_path / "accelerate.checkpoint"
    interrupted = make()
    by_accelerate(interrupted, data, 4, save=file, stop=stop)
    close(expected, by_accelerate(interrupted, data, None, resume=file))

    first = trainer(make(), data, tmp_path / "trainer", 4, save_strategy="steps", save_steps=stop)
    first.train()
    later = make()
    again = trainer(later, data, tmp_path / "trainer", 100)
    again.train(resume_from_checkpoint=str(tmp_path / "trainer" / f"checkpoint-{stop}"))
    assert again.state.global_step == plan(6).steps
    close(expected, weights(later))

    folder = tmp_path / "lightning"
    save = lightning.callbacks.ModelCheckpoint(
        dirpath=folder, every_n_train_steps=stop, save_top_k=-1
    )
    by_lightning(make(), data, folder, 4, enable_checkpointing=True, more=[save])
    moved = folder.rename(tmp_path / "moved")  # the private state is found beside the checkpoint
    (checkpoint,) = moved.glob(f"*step={stop}.ckpt")
    later = make()
    found, fit = by_lightning(later, data, moved, 100, resume=checkpoint)
    assert fit.global_step == plan(6).steps
    close(expected, {name.removeprefix("model."): value for name, value in found.items()})


@pytest.mark.filterwarnings("ignore")
def test_private_state_goes_with_the_lightning_checkpoint_that_it_is_of(tmp_path: Path) -> None:
    """Of the best two, of the last one, which is written at the end once more, and of none kept."""
    data, made = Sentences(), set[str]()

    class See(lightning.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_start(self, *rest: Any) -> None:
            made.update(path.name for path in tmp_path.glob("private-*"))

    every = lightning.callbacks.ModelCheckpoint(
        dirpath=tmp_path, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max",
        save_last=True, filename="{step}",
    )  # fmt: skip
    expected, fit = by_lightning(
        Bag(), data, tmp_path, 4, enable_checkpointing=True, more=[every, See()]
    )
    steps = plan(6).steps
    assert len(made) > 2, "there were others"
    kept = {f"private-step={step}.checkpoint" for step in (steps - 1, steps)}
    assert {path.name for path in tmp_path.glob("private-*")} == kept
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {
        "last.ckpt", f"step={steps - 1}.ckpt", f"step={steps}.ckpt"
    }  # fmt: skip
    assert "save_checkpoint" not in vars(fit.strategy)
    found, _ = by_lightning(Bag(), data, tmp_path, 4, resume=tmp_path / f"step={steps - 1}.ckpt")
    close(expected, found)


@pytest.mark.filterwarnings("ignore")
def test_a_lightning_checkpoint_saved_by_hand_is_gone_on_from(tmp_path: Path) -> None:
    """Without a ModelCheckpoint; its private state is in the Trainer's own folder."""
    file = tmp_path / "by hand.ckpt"

    class Save(lightning.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(file)

    data = Sentences()
    expected, _ = by_lightning(Bag(), data, tmp_path, 4, more=[Save()])
    found, fit = by_lightning(Bag(), data, tmp_path, 4, resume=file)
    assert fit.global_step == plan(6).steps
    close(expected, found)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_logs_public_figures_only(tmp_path: Path) -> None:
    run = trainer(Bag(), Sentences(), tmp_path, 4)
    output = run.train()
    assert run.state.log_history
    for entry in run.state.log_history:
        assert not {"loss", "grad_norm", "train_loss", "total_flos"} & entry.keys()
        assert entry["epsilon_reserved"] == run.private.spent().epsilon
    assert output.training_loss != output.training_loss
    assert run.state.total_flos == 0
    assert not any("not checked" in item.text for item in run.private.basis)


@pytest.mark.filterwarnings("ignore")
def test_figures_of_training_batches_are_left_out_under_any_name(tmp_path: Path) -> None:
    """As TRL's trainers and users' own losses log them."""
    run = trainer(Bag(), Sentences(), tmp_path, 4, public=("temperature",))

    def telling(model: nn.Module, batch: Any) -> Tensor:
        losses = losses_from_labels(model, batch)
        if run.private is not None:
            run.log({"rewards/chosen": float(losses.detach().mean()), "temperature": 0.5})
        return losses

    run._losses = telling
    with pytest.warns(UserWarning, match="'rewards/chosen' will not be logged"):
        run.train()
    logged = {key for entry in run.state.log_history for key in entry}
    assert "temperature" in logged
    assert "rewards/chosen" not in logged


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_does_not_score_the_training_data(tmp_path: Path) -> None:
    run = trainer(Bag(), Sentences(), tmp_path, 4)
    with pytest.raises(ValueError, match="eval_dataset is the training data"):
        run.evaluate(run.train_dataset)
    with pytest.raises(ValueError, match="eval_dataset is the training data"):
        run.evaluate({"train": run.train_dataset})
    assert "eval_loss" in run.evaluate(Sentences())


def in_the_step(module: Any, losses: Tensor) -> None:
    module.log("train_loss", losses.mean())


def as_a_mapping(module: Any, losses: Tensor) -> None:
    module.log_dict({"epsilon": 2.0, "train_loss": losses.mean()})


def kept_for_later(module: Any, losses: Tensor) -> None:
    module.kept = losses.detach().mean()


def nothing_private(module: Any, losses: Tensor) -> None:
    module.log("epsilon", 2.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tell", [in_the_step, as_a_mapping, kept_for_later, nothing_private])
def test_lightning_logs_in_training_what_is_vouched_for_only(
    tell: Callable[[Any, Tensor], None], tmp_path: Path
) -> None:
    class Telling(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses = super().training_step(batch, batch_idx)
            tell(self, losses)
            return losses

        def on_train_epoch_end(self) -> None:
            if tell is kept_for_later:
                self.log("train_loss", self.kept)

    callback = PrivateCallback(plan(6), Sentences(), collate_fn=collate, public_figures=["epsilon"])
    fit = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path, callbacks=[callback],
    )  # fmt: skip
    module = Telling(Bag())
    if tell is nothing_private:
        fit.fit(module, callback.loader)
        assert set(fit.callback_metrics) == {"epsilon"}
    else:
        with pytest.raises(dpoptim.PrivacyError, match="'train_loss' was logged in training"):
            fit.fit(module, callback.loader)
    assert "log" not in vars(module)


@pytest.mark.filterwarnings("ignore")
def test_options_that_cannot_be_kept_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_steps=7"):
        trainer(Bag(), Sentences(), tmp_path, 4, gradient_accumulation_steps=7)
    with pytest.raises(ValueError, match="more than the plan's"):
        trainer(Bag(), Sentences(), tmp_path, 4, max_steps=1000)
    for given in ({"compute_loss_func": print}, {}):
        with pytest.raises(ValueError, match="compute_loss.*losses=fn"):
            (PrivateTrainer if given else OwnLoss)(
                Bag(), training_arguments(tmp_path, 4), plan=plan(6), **given
            )
    callback = PrivateCallback(plan(6), Sentences(), collate_fn=collate)
    for option in ({"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}):
        fit = lightning.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path,
            callbacks=[callback], **option,
        )  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(option))), contextlib.suppress(SystemExit):
            fit.fit(Module(Bag()), callback.loader)
