"""TweetEval's emotion and emoji (Barbieri et al. 2020) as sentence features; public data."""

from pathlib import Path

import numpy as np

from dpoptim.data import Data, Labels, encode_text


def load_tweets(
    directory: str | Path, *, cache: str | Path | None = None, most: int | None = None
) -> Data:
    """A folder of TweetEval: train and test texts as features of shape (n, 384), rows of norm 1.

    Args:
        directory: with ``train_text.txt``, ``train_labels.txt``, ``test_text.txt``,
            ``test_labels.txt``, ``mapping.txt``.
        cache: see `encode_text`.
        most: use the first so many records of each part; encoding takes 10 ms a text.

    Raises:
        FileNotFoundError: a file is missing. ValueError: texts and labels do not belong together.
    """
    folder = Path(directory)
    classes = [line.split("\t")[1] for line in lines(folder / "mapping.txt")]
    parts = []
    for part in ("train", "test"):
        texts = lines(folder / f"{part}_text.txt")
        labels: Labels = np.array(
            [int(line) for line in lines(folder / f"{part}_labels.txt")], dtype=np.int64
        )
        if len(texts) != len(labels) or not 0 <= labels.min() <= labels.max() < len(classes):
            raise ValueError(
                f"{folder}: {len(texts)} {part} texts and {len(labels)} labels of {len(classes)} "
                "classes."
            )
        parts.append((encode_text(texts[:most], cache=cache), labels[:most]))
    (x, y), (x_test, y_test) = parts
    return Data(folder.name, x, y, x_test, y_test, tuple(classes), public=True)


def tasks_in(directory: str | Path) -> list[Path]:
    """The folder of a task itself, or those of the tasks right below it, in order of names.

    Raises:
        FileNotFoundError: there is none.
    """
    folder = Path(directory)
    found = [
        each for each in (folder, *sorted(folder.glob("*"))) if (each / "train_text.txt").is_file()
    ]
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no task of TweetEval: give one of its datasets, such as emotion, or "
            "a folder of several."
        )
    return found


def lines(path: Path) -> list[str]:
    """The lines of a file; tweets hold characters that other functions would split at."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: give a folder of TweetEval, such as its datasets/emotion."
        )
    text = path.read_text(encoding="utf-8")
    return text.removesuffix("\n").split("\n")
