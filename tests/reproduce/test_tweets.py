"""Tweets are read line by line, with the labels that belong to them."""

from pathlib import Path

import numpy as np
import pytest

from dpoptim.reproduce import real_cases


def folder(path: Path, labels: str = "0\n1\n0\n") -> Path:
    (path / "mapping.txt").write_text("0\tanger\n1\tjoy\n")
    for part in ("train", "test"):
        (path / f"{part}_text.txt").write_text(
            "so angry\na line\u2028with its own break \nno\n", encoding="utf-8"
        )
        (path / f"{part}_labels.txt").write_text(labels)
    return path


def test_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def lengths(texts: list[str], cache: Path | None) -> np.ndarray:
        seen.append((texts, cache))
        return np.array([[len(text)] for text in texts], dtype=np.float32)

    monkeypatch.setattr(real_cases, "encode_text", lengths)
    data = real_cases.load_tweets(folder(tmp_path), most=2)
    assert data.class_names == ("anger", "joy")
    assert data.x[:, 0].tolist() == [8, 26]
    assert data.y.tolist() == [0, 1]
    assert [cache for _, cache in seen] == [None, None]


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="mapping.txt is missing"):
        real_cases.load_tweets(tmp_path)
    for labels in ("0\n1\n", "0\n1\n7\n"):
        with pytest.raises(ValueError, match="3 train texts"):
            real_cases.load_tweets(folder(tmp_path, labels))
