"""Checkpoint folders of Hugging Face's Trainer, with the private state in each."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from dpoptim.training.private_training import PrivateTraining

SECRET = "private.checkpoint"  # in each checkpoint folder; secret, like the data


class PrivateCheckpoints:
    """A Trainer whose checkpoint folders a run that was killed at any moment goes on from."""

    private: PrivateTraining | None
    _noise_seed: int | None

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *rest: Any, **options: Any
    ) -> Any:
        """As the Trainer; ``True`` leaves out a folder that a kill left half written."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_folder(self.args.output_dir)  # type: ignore[attr-defined]
        return super().train(resume_from_checkpoint, *rest, **options)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write the private state first: the Trainer then removes older folders."""
        if self.private is not None:
            name = f"checkpoint-{self.state.global_step}"  # type: ignore[attr-defined]
            folder = Path(self._get_output_dir(trial=trial)) / name  # type: ignore[attr-defined]
            folder.mkdir(parents=True, exist_ok=True)
            self.private.save(folder / SECRET)
        super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        """Save none: generators were seeded in secret, and their states tell how many rows drew."""
        if self._noise_seed is not None:
            super()._save_rng_state(output_dir)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load none: a resumed run seeds its generators anew."""
        if self._noise_seed is not None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]


def last_whole_folder(output_dir: str) -> str:
    """The newest checkpoint folder that was written to its end.

    Raises:
        ValueError: there is none.
    """
    folders = [each for each in Path(output_dir).glob("checkpoint-*") if is_whole(each)]
    if not folders:
        raise ValueError(
            f"resume_from_checkpoint=True: {output_dir} has no whole checkpoint of a private run. "
            "Fix: name a folder that holds one; or train() begins a run, which is a charge of its "
            "own."
        )
    return str(max(folders, key=lambda each: int(each.name.rpartition("-")[2])))


def is_whole(folder: Path) -> bool:
    """Whether the Trainer's state is there, which it writes last, and the private one, first."""
    if not folder.name.rpartition("-")[2].isdecimal() or not (folder / SECRET).is_file():
        return False
    with suppress(OSError, ValueError):
        json.loads((folder / TRAINER_STATE_NAME).read_text())
        return True
    return False
