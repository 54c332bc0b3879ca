"""``model.pt``: a trained model and how to read records; plain data, loaded running no code."""

import hashlib
import io
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpoptim.data import Data, Preparation, Schema, parse_schema
from dpoptim.data.schema_files import to_toml
from dpoptim.files import write_atomically
from dpoptim.runs.models import build_model

FORMAT = "dpoptim.model/1"


@dataclass(frozen=True)
class SavedModel:
    """A model to predict with.

    Attributes:
        name: of the architecture, one of `dpoptim.runs.models.MODELS`.
        shape: of a record's features.
        class_names: in the order of the outputs; empty for regression.
        target_bounds: of the number to predict; None: classification.
        encoding: how features are made of new records; None: not known.
        row_norm: to which the rows of a linear model are clipped; None: not at all.
    """

    model: nn.Module
    name: str
    shape: tuple[int, ...]
    class_names: tuple[str, ...]
    target_bounds: tuple[float, float] | None
    encoding: Schema | Preparation | None
    row_norm: float | None = None


def model_contents(
    model: nn.Module, name: str, data: Data, row_norm: float | None = None
) -> dict[str, Any]:
    """The contents of ``model.pt``: text, numbers, tensors, public once the model is."""
    schema = data.encoding if isinstance(data.encoding, Schema) else None
    preparation = data.encoding if isinstance(data.encoding, Preparation) else None
    return {
        "format": FORMAT,
        "model": name,
        "shape": list(data.x.shape[1:]),
        "class_names": list(data.class_names),
        "target_bounds": None if data.target_bounds is None else list(data.target_bounds),
        "schema": None if schema is None else to_toml(schema),
        "preparation": None if preparation is None else preparation.to_json(),
        "row_norm": row_norm,
        "state_dict": model.state_dict(),
    }


def save_model(
    path: Path, model: nn.Module, name: str, data: Data, row_norm: float | None = None
) -> str:
    """Write the model, and return the file's SHA-256.

    Where the folder fails, it goes into a temporary one, because the budget that made it is spent.
    """
    buffer = io.BytesIO()
    torch.save(model_contents(model, name, data, row_norm), buffer)
    try:
        write_atomically(path, buffer.getvalue())
    except OSError as error:
        rescue = Path(tempfile.mkdtemp(prefix="dpoptim-")) / path.name
        write_atomically(rescue, buffer.getvalue())
        raise OSError(
            f"{error} The trained model was saved to {rescue} instead; its budget is spent."
        ) from error
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def model_file(path: str | Path) -> Path:
    """The ``model.pt`` of a run directory; a file as it is."""
    path = Path(path)
    return path / "model.pt" if path.is_dir() else path


def load_model(path: str | Path) -> SavedModel:
    """Load ``model.pt`` of a run directory, or such a file; no code in it is run.

    Raises:
        FileNotFoundError, ValueError: naming the file and the fix.
    """
    file = model_file(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist; name the run directory of a finished dpoptim train."
        )
    try:
        return from_contents(torch.load(file, weights_only=True, map_location="cpu"))
    except Exception as error:  # whatever the decoder makes of a damaged file
        kind = (
            f"{type(error).__name__}: {str(error)[:200]}"
            if isinstance(error, ValueError)
            else type(error).__name__
        )
        raise ValueError(
            f"{file} is no model that dpoptim train wrote, or is damaged ({kind})."
        ) from None


def from_contents(saved: Mapping[str, Any]) -> SavedModel:
    if saved["format"] != FORMAT:
        raise ValueError(f"format {saved['format']!r} is not {FORMAT!r}; train again")
    shape = tuple(saved["shape"])
    names = tuple(saved["class_names"])
    bounds = saved["target_bounds"]
    model = build_model(saved["model"], shape, 1 if bounds is not None else len(names))
    model.load_state_dict(saved["state_dict"])
    schema, preparation = saved["schema"], saved["preparation"]
    return SavedModel(
        model.eval(),
        saved["model"],
        shape,
        names,
        None if bounds is None else (float(bounds[0]), float(bounds[1])),
        parse_schema(schema)
        if schema is not None
        else Preparation.from_json(preparation)
        if preparation
        else None,
        saved["row_norm"],
    )
