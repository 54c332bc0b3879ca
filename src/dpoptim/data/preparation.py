"""Preparation of each record's array by itself before a model, for prediction to repeat."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dpoptim.data.large_arrays import cached_features, room_for
from dpoptim.data.scattering import Scattering

Floats = NDArray[np.float32]
# images at a time; a fixed shape, so that no record's last bits depend on how many others there
# are
CHUNK = 32


class Step(Protocol):
    """A map of each record alone: a frozen dataclass whose fields JSON can hold."""

    def __call__(self, x: Floats) -> Floats:
        """New arrays (records, ...) of old ones."""
        ...

    def describe(self) -> str:
        """A few words for reports."""
        ...


@dataclass(frozen=True)
class Divide:
    """Divide by a public number, such as 255 for bytes."""

    by: float

    def __call__(self, x: Floats) -> Floats:
        return x.astype(np.float32) / np.float32(self.by)

    def describe(self) -> str:
        return f"divided by {self.by:g}"


@dataclass(frozen=True)
class ChannelsFirst:
    """Give images (height, width) an axis of channels; move one that comes last to the front."""

    def __call__(self, x: Floats) -> Floats:
        if x.ndim == 3:
            return x[:, None]
        if x.ndim == 4 and x.shape[-1] in (1, 3, 4):
            return np.ascontiguousarray(np.moveaxis(x, -1, 1))
        return x

    def describe(self) -> str:
        return "images"


@dataclass(frozen=True)
class SquareRoot:
    """sqrt(p) - 0.4 for pixels p in [0, 1]: evens out what clipped gradients see."""

    def __call__(self, x: Floats) -> Floats:
        return np.sqrt(np.clip(x, 0, 1)) - np.float32(0.4)

    def describe(self) -> str:
        return "sqrt(pixel) - 0.4"


@dataclass(frozen=True)
class OpponentColours:
    """Brightness and two differences of colours, by a rotation, of images of three channels.

    Red, green and blue rise and fall together, so what differs between them is small beside what
    they share, until a later step brings each to the same size. Other images stay.

    Attributes:
        scale: that all are multiplied by. `Scatter` adds 1e-5 to each group's variance, which is
            more than that of fine details, and of colours, in many photographs.

    **Guarantee.** A map of each record alone, by public numbers, that multiplies its norm.
    """

    scale: float = 8.0

    def __call__(self, x: Floats) -> Floats:
        if x.ndim != 4 or x.shape[1] != 3:
            return x
        red, green, blue = (x[:, i] for i in range(3))
        mixed: Floats = np.empty(x.shape, dtype=np.float32)
        mixed[:, 0] = (red + green + blue) * np.float32(self.scale / math.sqrt(3))
        mixed[:, 1] = (red - blue) * np.float32(self.scale / math.sqrt(2))
        mixed[:, 2] = (red - 2 * green + blue) * np.float32(self.scale / math.sqrt(6))
        return mixed

    def describe(self) -> str:
        return f"colours as brightness and differences, times {self.scale:g}"


@dataclass(frozen=True)
class UnitNorm:
    """Scale each record to Euclidean norm 1; zeros stay."""

    def __call__(self, x: Floats) -> Floats:
        flat = x.reshape(len(x), -1).astype(np.float64)
        norms = np.linalg.norm(flat, axis=1, keepdims=True)
        return (flat / np.where(norms > 0, norms, 1)).astype(np.float32).reshape(x.shape)

    def describe(self) -> str:
        return "each record scaled to norm 1"


@dataclass(frozen=True)
class Scatter:
    """Scattering coefficients of images (see `Scattering`), each normalised by groups of planes.

    Attributes:
        groups: of planes; each group of each record is brought to mean 0 and deviation 1. Divides
            the planes.
    """

    scales: int = 2
    angles: int = 8
    groups: int = 27

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the features of images (records, channels, height, width)."""
        if len(shape) != 4:
            raise ValueError(
                f"scattering takes images (records, channels, height, width), got shape {shape}."
            )
        transform = Scattering(shape[2], shape[3], scales=self.scales, angles=self.angles)
        planes = shape[1] * transform.planes
        if planes % self.groups:
            raise ValueError(
                f"groups={self.groups} must divide the {planes} planes of coefficients."
            )
        return (shape[0], planes, *transform.size)

    def __call__(self, x: Floats) -> Floats:
        return self.fill(room_for(self.shape_of(x.shape)), x)

    def fill(self, features: Floats, x: Floats) -> Floats:
        """Write the features of ``x`` into ``features``, of `shape_of` them, a chunk at a time."""
        transform = Scattering(x.shape[2], x.shape[3], scales=self.scales, angles=self.angles)
        for start in range(0, len(x), CHUNK):
            part = np.zeros((CHUNK, *x.shape[1:]), dtype=np.float32)
            rows = min(CHUNK, len(x) - start)
            part[:rows] = x[start : start + rows]
            planes = torch.nn.functional.group_norm(transform(torch.from_numpy(part)), self.groups)
            features[start : start + rows] = planes[:rows].numpy()
        return features

    def describe(self) -> str:
        return f"scattering, J={self.scales}, L={self.angles}, normalised in {self.groups} groups"


@dataclass(frozen=True)
class Whiten:
    """Feature planes (records, planes, height, width), whitened by what holds of most images.

    Planes of local energies rise and fall together, and slowly across an image. So most of each
    record's norm, which clipping bounds and noise is measured by, repeats itself; a fixed linear
    map shrinks that part.

    Attributes:
        shared: what the mean over planes, at each place, is multiplied by; > 0.
        detail: frequency (i, j) of each plane's two-dimensional cosine transform is multiplied by
            ``(1 + (i^2 + j^2) / 2) ** detail``.
        most_planes: records of more planes stay as they are; None: all are whitened.

    **Guarantee.** A map of each record alone, by public numbers.
    """

    shared: float = 0.3
    detail: float = 0.25
    most_planes: int | None = None

    def __call__(self, x: Floats) -> Floats:
        if x.ndim != 4:
            raise ValueError(
                f"whitening takes planes (records, planes, height, width), got shape {x.shape}."
            )
        if self.most_planes is not None and x.shape[1] > self.most_planes:
            return x
        down, across = cosines(x.shape[2]), cosines(x.shape[3])
        frequencies = torch.arange(x.shape[2])[:, None] ** 2 + torch.arange(x.shape[3]) ** 2
        gains = ((1 + frequencies.double() / 2) ** self.detail).float()
        whitened = room_for(x.shape)
        for start in range(0, len(x), CHUNK):
            part = torch.zeros(CHUNK, *x.shape[1:])
            rows = min(CHUNK, len(x) - start)
            part[:rows] = torch.from_numpy(np.array(x[start : start + rows]))
            part -= (1 - self.shared) * part.mean(1, keepdim=True)
            part = down.T @ (gains * (down @ part @ across.T)) @ across
            whitened[start : start + rows] = part[:rows].numpy()
        return whitened

    def describe(self) -> str:
        most = "" if self.most_planes is None else f", if at most {self.most_planes} planes"
        return f"whitened (shared {self.shared:g}, detail {self.detail:g}{most})"


def cosines(size: int) -> torch.Tensor:
    """The orthonormal cosine basis (DCT-II) of ``size`` places, a row a frequency; float32."""
    places = torch.arange(size, dtype=torch.float64)
    waves = torch.cos(math.pi / size * (places + 0.5) * places[:, None])
    return (waves / waves.norm(dim=1, keepdim=True)).float()


STEPS: dict[str, Callable[..., Step]] = {
    "channels-first": ChannelsFirst,
    "divide": Divide,
    "square-root": SquareRoot,
    "opponent-colours": OpponentColours,
    "unit-norm": UnitNorm,
    "scatter": Scatter,
    "whiten": Whiten,
}


@dataclass(frozen=True)
class Preparation:
    """Steps that turn arrays (records, ...) of ``shape`` into features.

    **Guarantee.** A record's features are a function of that record and public settings.
    """

    shape: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    def __call__(self, x: NDArray[Any], *, cache: Path | None = None) -> Floats:
        """Make features of records as they are in a file.

        Args:
            cache: a folder in which scattering features are kept and found again; see
                `cached_features`.

        Raises:
            ValueError: they have another shape, or a value that is not finite.
        """
        if x.shape[1:] != self.shape:
            raise ValueError(
                f"records have shape {x.shape[1:]}; the model was trained on {self.shape}."
            )
        with np.errstate(over="ignore"):  # too large for float32 is infinite, and refused
            features: Floats = x.astype(np.float32)
        finite = np.isfinite(features.reshape(len(features), -1)).all(1)
        if not finite.all():
            record = int(np.argmin(finite)) + 1
            raise ValueError(
                f"record {record} has a feature that is NaN or infinite; clean or drop it."
            )
        for step in self.steps:
            if cache is not None and isinstance(step, Scatter):
                features = cached_features(
                    cache, repr(step), features, step.shape_of(features.shape), step.fill
                )
            else:
                features = step(features)
        return features

    def describe(self) -> str:
        return ", ".join(step.describe() for step in self.steps) or "as in the file"

    def to_json(self) -> dict[str, Any]:
        names = {kind: name for name, kind in STEPS.items()}
        steps = [{"step": names[type(step)], **asdict(step)} for step in self.steps]  # type: ignore[call-overload]
        return {"shape": list(self.shape), "steps": steps}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Preparation":
        return cls(tuple(data["shape"]), steps_of(data["steps"]))


def steps_of(entries: Sequence[Mapping[str, Any]]) -> tuple[Step, ...]:
    return tuple(
        STEPS[entry["step"]](**{name: value for name, value in entry.items() if name != "step"})
        for entry in entries
    )
