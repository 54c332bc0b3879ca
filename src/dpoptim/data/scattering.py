"""The scattering transform: features of images that no data has taught, so they cost no privacy.

Wavelets, modulus, average; again on each modulus; nothing is learned (Mallat 2012; Bruna and
Mallat 2013). Tramèr and Boneh (2021) show that a linear model on such features is hard to beat
under differential privacy.
"""

import math

import torch
from torch import Tensor

COPIES = 2  # periods on each side over which a filter is summed, so that it is periodic
# over the number of angles: width of an envelope along its wave, over that across it
ROUNDNESS = 4.0
NARROWEST = 0.8  # width of the narrowest envelope, in pixels
HIGHEST_FREQUENCY = 0.75 * math.pi  # of the narrowest wavelet, in radians a pixel


def gabor(
    height: int, width: int, sigma: float, angle: float, frequency: float, slant: float
) -> Tensor:
    """A plane wave under a Gaussian, periodic: complex128 (height, width), origin (0, 0)."""
    offsets = torch.arange(-COPIES, COPIES + 1, dtype=torch.float64)
    rows = (torch.arange(height, dtype=torch.float64)[:, None] + offsets * height).reshape(-1, 1)
    columns = (torch.arange(width, dtype=torch.float64)[:, None] + offsets * width).reshape(1, -1)
    along = rows * math.cos(angle) + columns * math.sin(angle)
    across = -rows * math.sin(angle) + columns * math.cos(angle)
    envelope = -(along.square() + (slant * across).square()) / (2 * sigma**2)
    wave = torch.exp(torch.complex(envelope, along * frequency))
    periods = wave.view(height, 2 * COPIES + 1, width, 2 * COPIES + 1).sum((1, 3))
    return periods * (slant / (2 * math.pi * sigma**2))


def morlet(
    height: int, width: int, sigma: float, angle: float, frequency: float, slant: float
) -> Tensor:
    """A Gabor filter less the multiple of its envelope that makes its sum zero."""
    wave = gabor(height, width, sigma, angle, frequency, slant)
    envelope = gabor(height, width, sigma, angle, 0.0, slant)
    return wave - wave.sum() / envelope.sum() * envelope


def wavelet_spectra(height: int, width: int, scales: int, angles: int) -> Tensor:
    """Fourier transforms of Morlet wavelets, real: float64 (scales, angles, height, width).

    Each gives zero for a constant.
    """
    wavelets = [
        morlet(
            height,
            width,
            NARROWEST * 2**scale,
            angle * math.pi / angles,
            HIGHEST_FREQUENCY / 2**scale,
            ROUNDNESS / angles,
        )
        for scale in range(scales)
        for angle in range(angles)
    ]
    return torch.fft.fft2(torch.stack(wavelets)).real.view(scales, angles, height, width)


def averaging(size: int, scales: int, factor: int) -> Tensor:
    """The Gaussian average along one axis: float64 of shape (size / 2**scales - 2, size / factor).

    From every ``factor``-th pixel of a periodic axis to every ``2**scales``-th, but for the first
    and the last.
    """
    step = 2**scales
    centres = torch.arange(step, size - step, step, dtype=torch.float64)[:, None]
    pixels = torch.arange(0, size, factor, dtype=torch.float64)
    periods = torch.arange(-COPIES, COPIES + 1, dtype=torch.float64)[:, None, None] * size
    sigma = NARROWEST * 2 ** (scales - 1)
    weights = torch.exp(-(pixels + periods - centres).square() / (2 * sigma**2)).sum(0)
    return weights / weights.sum(1, keepdim=True)


def fold(spectrum: Tensor, factor: int) -> Tensor:
    """The spectrum of every ``factor``-th pixel in both directions: aliases are averaged."""
    for axis in (-2, -1):
        parts = spectrum.chunk(factor, axis)
        # ten times as fast as a mean over a strided axis
        spectrum = sum(parts[1:], start=parts[0])
    return spectrum / factor**2 if factor > 1 else spectrum


class Scattering:
    """Scattering coefficients of order 0, 1 and 2 of images of one shape.

    Args:
        height, width: of the images, in pixels, at least ``2**scales``.
        scales: J; features are averages over about ``2**J`` pixels, one for each square of
            ``2**J`` pixels.
        angles: L; directions of the wavelets.

    An image of ``channels`` planes gives ``channels * (1 + J L + J (J - 1) L^2 / 2)`` planes of
    about (height / 2**J, width / 2**J) pixels. Each plane of the image goes through by itself.

    **Guarantee.** Features of an image are a function of that image and of public numbers. All
    images of a chunk go through the same operations in fixed shapes.
    """

    def __init__(self, height: int, width: int, *, scales: int = 2, angles: int = 8) -> None:
        if scales < 1 or angles < 1:
            raise ValueError(f"scales and angles must be at least 1, got {scales} and {angles}.")
        if min(height, width) < 2**scales:
            raise ValueError(
                f"images of {height} x {width} pixels are too small for scales={scales}, which "
                f"averages over {2**scales} pixels; choose a smaller one."
            )
        self.height, self.width, self.scales, self.angles = height, width, scales, angles
        step = 2**scales
        # Mirrored by about one averaging window on each side, then trimmed by one coefficient on
        # each.
        padded = [(size // step + 2) * step for size in (height, width)]
        before = [(whole - size) // 2 for whole, size in zip(padded, (height, width), strict=True)]
        self._padding = (
            before[1],
            padded[1] - width - before[1],
            before[0],
            padded[0] - height - before[0],
        )
        spectra = wavelet_spectra(padded[0], padded[1], scales, angles)
        self._wavelets = [
            (fold(spectra, 2**scale) * 4**scale).to(torch.float32) for scale in range(scales)
        ]
        self._averages = [
            tuple(averaging(size, scales, 2**scale).to(torch.float32) for size in padded)
            for scale in range(scales)
        ]

    @property
    def planes(self) -> int:
        """Coefficient planes for one plane of the image."""
        return 1 + self.scales * self.angles + self.scales * (self.scales - 1) // 2 * self.angles**2

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of a coefficient plane."""
        return self.height // 2**self.scales, self.width // 2**self.scales

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Coefficients, float32 (n, channels * planes, *size), of (n, channels, height, width)."""
        if images.ndim != 4 or images.shape[2:] != (self.height, self.width):
            raise ValueError(
                f"images must have shape (n, channels, {self.height}, {self.width}), got "
                f"{tuple(images.shape)}."
            )
        padded = torch.nn.functional.pad(images.to(torch.float32), self._padding, mode="reflect")
        spectrum = torch.fft.fft2(padded)
        n, channels = images.shape[:2]
        planes = [self._averaged(padded, 0)[:, :, None]]
        for scale in range(self.scales):
            first = self._moduli(spectrum[:, :, None], self._wavelets[0][scale], 2**scale)
            # of (n, channels, angles, h, w) at every 2**scale-th pixel
            planes.append(self._averaged(first, scale))
            again = torch.fft.fft2(first)[:, :, :, None]
            for coarser in range(scale + 1, self.scales):
                second = self._moduli(again, self._wavelets[scale][coarser], 2 ** (coarser - scale))
                planes.append(self._averaged(second, coarser).flatten(2, 3))
        return torch.cat(planes, 2).reshape(n, channels * self.planes, *self.size)

    def _moduli(self, spectrum: Tensor, wavelets: Tensor, factor: int) -> Tensor:
        return torch.fft.ifft2(fold(spectrum * wavelets, factor)).abs()

    def _averaged(self, planes: Tensor, scale: int) -> Tensor:
        down, across = self._averages[scale]
        return down @ planes @ across.T
