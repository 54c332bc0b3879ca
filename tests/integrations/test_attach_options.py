"""Trainers take whatever `dpoptim.attach` takes, by its names, and hand it on."""

import inspect
from pathlib import Path
from typing import Any

import pytest

import dpoptim

transformers = pytest.importorskip("transformers")
pytest.importorskip("lightning.pytorch")

from dpoptim.integrations import lightning as of_lightning  # noqa: E402
from dpoptim.integrations import transformers as of_transformers  # noqa: E402
from integrations.small_language import Bag, Sentences, collate  # noqa: E402
from integrations.test_mistakes import DATA, Module, arguments  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
OWNERS = [i // 2 for i in range(20)]


def plan(n: int = 10) -> dpoptim.Plan:
    return dpoptim.DPSGD(clip_norm=1.0).plan(n=n, batch_size=4, steps=2, epsilon=4.0, delta=1e-3)


def trainer(folder: Path, **options: Any) -> of_transformers.PrivateTrainer:
    options = {"plan": plan(), **options}
    return of_transformers.PrivateTrainer(
        Bag(), arguments(folder), train_dataset=Sentences(20), data_collator=collate, **options
    )


def fitted(folder: Path, **options: Any) -> of_lightning.PrivateCallback:
    callback = of_lightning.PrivateCallback(plan(), DATA, **options)
    lightning = pytest.importorskip("lightning.pytorch")
    lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[callback], max_epochs=1, enable_checkpointing=False,
    ).fit(Module(), callback.loader)  # fmt: skip
    return callback


@pytest.mark.parametrize("rows", [1, 2])
def test_persons_with_several_rows_are_protected(rows: int, tmp_path: Path) -> None:
    ran = trainer(tmp_path, persons=OWNERS, rows_per_record=rows)
    ran.train()
    callback = fitted(tmp_path, persons=OWNERS, rows_per_record=rows)
    for private in (ran.private, callback.private):
        assert private is not None
        assert private.steps_done == 2
        assert private.spent().unit == "person"
        assert private._engine.rows.per_record == rows


class HandedOn(Exception):
    pass


@pytest.mark.parametrize("home", [of_transformers, of_lightning])
def test_every_argument_of_attach_is_taken_or_has_another_name(
    home: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = inspect.signature(dpoptim.attach).parameters.values()
    names = [each.name for each in arguments if each.kind is each.KEYWORD_ONLY]
    run = trainer if home is of_transformers else fitted
    assert set(home.OWN_NAMES) <= set(names)

    def attach(*args: Any, **options: Any) -> None:
        raise HandedOn(options)

    monkeypatch.setattr(home, "attach", attach)
    for name in names:
        own = home.OWN_NAMES.get(name)
        if own is not None:
            with pytest.raises(TypeError, match=f"takes no {name}. Fix: "):
                run(tmp_path, **{name: 2})
            continue
        with pytest.raises(HandedOn) as handed:
            ran = run(tmp_path, **{name: 2})
            ran.train()  # type: ignore[union-attr]
        assert handed.value.args[0][name] == 2


def test_unknown_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="'person'. Fix: persons="):
        fitted(tmp_path, person=OWNERS)
    with pytest.raises(TypeError, match="author_mapping.*persons="):
        trainer(tmp_path, author_mapping=OWNERS)
    with pytest.raises(TypeError, match="privacy_args.*plan="):
        trainer(tmp_path, privacy_args=1)


def test_records_that_are_several_rows_already_have_no_persons(tmp_path: Path) -> None:
    class Pairs(of_transformers.PrivateTrainer):
        rows_per_record = 2

    for options in ({"persons": OWNERS}, {"rows_per_record": 2}):
        with pytest.raises(ValueError, match="makes several rows of a batch of each record"):
            Pairs(Bag(), arguments(tmp_path), train_dataset=Sentences(20), plan=plan(20), **options)
