"""A Trainer that died while it saved goes on from the newest folder that is whole."""

from pathlib import Path
from typing import Any

import pytest
import torch

import dpoptim
from integrations.small_language import Bag, Sentences, collate

transformers = pytest.importorskip("transformers")
from dpoptim.integrations.transformers import PrivateTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries' own
RECORDS, STEPS = 40, 6
WHOLE_AFTER = {"_save_optimizer_and_scheduler": 2, "rotate_checkpoints": 4}  # of the second save


class DiedError(Exception):
    pass


def trainer(folder: Path) -> PrivateTrainer:
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=RECORDS, batch_size=10, steps=STEPS, noise_multiplier=1.0, delta=1e-4
    )
    model = Bag()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, report_to=[], use_cpu=True,
        save_strategy="steps", save_steps=2, save_total_limit=1, disable_tqdm=True,
    )  # fmt: skip
    return PrivateTrainer(
        model,
        arguments,
        train_dataset=Sentences(RECORDS),
        data_collator=collate,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        plan=plan,
        ledger=dpoptim.Ledger(folder.with_suffix(".sqlite")),
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", WHOLE_AFTER)
def test_a_trainer_that_died_while_it_saved_goes_on(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, of = 0, transformers.trainer if place == "rotate_checkpoints" else PrivateTrainer
    honest = getattr(of, place)

    def dies(*args: Any, **options: Any) -> None:
        nonlocal saves
        saves += 1
        honest(*args, **options)
        if saves == 2:
            raise DiedError

    with monkeypatch.context() as patch:
        patch.setattr(of, place, dies)
        with pytest.raises(DiedError):
            trainer(tmp_path / "run").train()
    again = trainer(tmp_path / "run")
    again.train(resume_from_checkpoint=True)
    assert again.private is not None
    assert again.state.global_step == again.private.steps_done == STEPS
    (run,) = dpoptim.Ledger(tmp_path / "run.sqlite").entries()
    assert run.state == "committed"
    assert run.resumed == 1
    assert run.repeated >= 4 - WHOLE_AFTER[place]


def test_folders_without_a_whole_checkpoint_say_so(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-best").mkdir()
    with pytest.raises(ValueError, match="no whole checkpoint"):
        trainer(tmp_path / "run").train(resume_from_checkpoint=True)
