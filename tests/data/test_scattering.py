"""The scattering transform: equal to its definition, a function of each image alone, and kept
where asked.
"""

import stat
from pathlib import Path

import numpy as np
import pytest
import scipy.fft
import torch

from dpoptim import files
from dpoptim.data import Preparation
from dpoptim.data.large_arrays import room_for
from dpoptim.data.preparation import (
    ChannelsFirst,
    Divide,
    OpponentColours,
    Scatter,
    SquareRoot,
    UnitNorm,
    Whiten,
)
from dpoptim.data.scattering import Scattering, averaging, wavelet_spectra


def images(n: int, height: int = 16, width: int = 20, channels: int = 1) -> torch.Tensor:
    return torch.rand(n, channels, height, width, generator=torch.Generator().manual_seed(0))


def test_coefficients_are_their_definition_at_full_resolution() -> None:
    """Wavelet, modulus, average; again on each modulus; without leaving out a pixel on the way."""
    scales, angles, padded = 2, 3, (24, 28)
    x = torch.nn.functional.avg_pool2d(images(2, 18, 22), 3, 1).double()
    transform = Scattering(16, 20, scales=scales, angles=angles)
    whole = torch.nn.functional.pad(x, (4, 4, 4, 4), mode="reflect")[:, 0]
    spectra = wavelet_spectra(*padded, scales, angles)
    down, across = (averaging(size, scales, 1) for size in padded)

    def moduli(planes: torch.Tensor, scale: int) -> torch.Tensor:
        return torch.fft.ifft2(torch.fft.fft2(planes)[:, None] * spectra[scale]).abs()

    expected = [(down @ whole @ across.T)[:, None]]
    for scale in range(scales):
        first = moduli(whole, scale)
        expected.append(down @ first @ across.T)
        for coarser in range(scale + 1, scales):
            second = torch.cat([moduli(first[:, angle], coarser) for angle in range(angles)], 1)
            expected.append(down @ second @ across.T)
    reference = torch.cat(expected, 1)
    found = transform(x)
    assert found.shape == reference.shape == (2, 1 + 6 + 9, 4, 5)
    # The inner planes are folded to fewer pixels, whose aliases are small beside what is there.
    torch.testing.assert_close(found.double(), reference, atol=4e-3, rtol=0)


def test_a_constant_has_its_mean_and_nothing_else() -> None:
    found = Scattering(16, 16, scales=3, angles=4)(torch.full((1, 1, 16, 16), 0.7))
    torch.testing.assert_close(found[:, 0], torch.full((1, 2, 2), 0.7), atol=1e-5, rtol=0)
    assert found[:, 1:].abs().max() < 1e-5


def test_a_stripe_is_seen_by_the_wavelet_across_it() -> None:
    columns = torch.cos(torch.arange(32) * 0.75 * torch.pi)
    found = Scattering(32, 32, scales=1, angles=4)(columns.repeat(32, 1)[None, None])[0, 1:].mean(
        (1, 2)
    )
    assert found.argmax() == 2  # angle pi / 2: along the columns
    assert found[2] > 5 * found[0]


def test_small_shifts_change_little() -> None:
    x = torch.nn.functional.avg_pool2d(images(1, 40, 40), 3, 1, 1)
    a, b = x[..., :32, :32], x[..., :32, 1:33]
    transform = Scattering(32, 32, scales=3)
    change = (transform(a) - transform(b)).norm() / transform(a).norm()
    assert change < 0.5 * (a - b).norm() / a.norm()


def test_features_of_an_image_are_its_own_to_the_last_bit() -> None:
    """Whatever images are with it, and however many."""
    x = images(70, channels=3).numpy()
    step = Scatter(scales=2, angles=4, groups=25)
    whole = step(x)
    assert whole.shape == (70, 75, 4, 5)
    other = x.copy()
    other[np.arange(70) != 40] = 0.5
    assert np.array_equal(step(other)[40], whole[40])
    assert np.array_equal(step(x[40:41])[0], whole[40])
    np.testing.assert_allclose(np.square(whole).mean((1, 2, 3)), 0.72, atol=0.05)
    grouped = whole.reshape(70, 25, -1)
    np.testing.assert_allclose(grouped.mean(2), 0, atol=1e-4)


def test_whitened_planes_of_a_record_are_its_own_to_the_last_bit() -> None:
    x = images(70, channels=3).numpy()
    whole = Whiten()(x)
    other = x.copy()
    other[np.arange(70) != 40] = 0.5
    assert np.array_equal(Whiten()(other)[40], whole[40])
    assert np.array_equal(Whiten()(x[40:41])[0], whole[40])
    with pytest.raises(ValueError, match="takes planes"):
        Whiten()(x[:, 0])


def test_opponent_colours_scale_norms_and_leave_grey_nothing_but_brightness() -> None:
    x = images(7, channels=3).numpy()
    mixed = OpponentColours()(x)
    lengths, expected = (np.linalg.norm(each, axis=1) for each in (mixed, x))
    np.testing.assert_allclose(lengths, 8 * expected, rtol=1e-5)
    grey = np.repeat(x[:, :1], 3, axis=1)
    np.testing.assert_allclose(OpponentColours()(grey)[:, 1:], 0, atol=1e-6)
    rotation = OpponentColours(1.0)(np.eye(3, dtype=np.float32)[:, :, None, None])[:, :, 0, 0]
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-6)


def test_opponent_colours_of_a_record_are_its_own_to_the_last_bit() -> None:
    x = images(70, channels=3).numpy()
    whole = OpponentColours()(x)
    other = x.copy()
    other[np.arange(70) != 40] = 0.5
    assert np.array_equal(OpponentColours()(other)[40], whole[40])
    assert np.array_equal(OpponentColours()(x[40:41])[0], whole[40])


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_images_of_other_channels_have_no_opponent_colours(channels: int) -> None:
    x = images(3, channels=channels).numpy()
    assert np.array_equal(OpponentColours()(x), x)


def test_whitening_stops_at_a_number_of_planes() -> None:
    x = images(5, channels=6).numpy()
    assert np.array_equal(Whiten(most_planes=5)(x), x)
    assert np.array_equal(Whiten(most_planes=6)(x), Whiten()(x))


def test_whitening_against_scipy() -> None:
    """What planes share is shrunk, each frequency is multiplied by its number, nothing is lost."""
    x = images(5, channels=6).numpy()
    np.testing.assert_allclose(Whiten(shared=1.0, detail=0.0)(x), x, atol=1e-5)
    mean = x.mean(1, keepdims=True)
    np.testing.assert_allclose(Whiten(0.25, 0.0)(x), x - 0.75 * mean, atol=1e-5)
    i, j = np.ogrid[: x.shape[2], : x.shape[3]]
    spectrum = scipy.fft.dctn(x, axes=(2, 3), norm="ortho") * (1 + (i**2 + j**2) / 2) ** 0.5
    expected = scipy.fft.idctn(spectrum, axes=(2, 3), norm="ortho")
    np.testing.assert_allclose(Whiten(1.0, 0.5)(x), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "shape", "said"),
    [
        ({"groups": 7}, (1, 1, 16, 16), "must divide the 81 planes"),
        ({"scales": 5}, (1, 1, 16, 16), "too small for scales=5"),
        ({"scales": 0}, (1, 1, 16, 16), "at least 1"),
        ({}, (1, 256), "takes images"),
    ],
)
def test_bad_settings(settings: dict[str, int], shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Scatter(**settings)(np.zeros(shape, np.float32))


def test_features_are_kept_for_their_owner_alone_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = (images(5, 8, 8)[:, 0].numpy() * 255).astype(np.uint8)
    preparation = Preparation(
        (8, 8), (ChannelsFirst(), Divide(255.0), Scatter(scales=1, angles=2, groups=3))
    )
    modes = []
    fill = Scatter.fill

    def watched(self: Scatter, features: np.ndarray, given: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache").iterdir())
        return fill(self, features, given)

    monkeypatch.setattr(Scatter, "fill", watched)
    features = preparation(x, cache=tmp_path / "cache")
    assert modes == [0o600]  # while it is written
    (file,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert isinstance(features, np.memmap)
    assert np.array_equal(features, preparation(x))
    monkeypatch.setattr(Scatter, "fill", None)
    assert np.array_equal(features, preparation(x, cache=tmp_path / "cache"))
    monkeypatch.setattr(Scatter, "fill", fill)
    file.unlink()
    file.write_bytes(b"damaged")
    assert np.array_equal(features, preparation(x, cache=tmp_path / "cache"))
    preparation(x[:4], cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_another_process_takes_no_unfinished_features_for_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = Scatter.fill

    def interrupted(self: Scatter, features: np.ndarray, given: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        files._swept.clear()  # as in a process that has not cleaned up here
        files.write_atomically(tmp_path / "other", b"")
        return fill(self, features, given)

    monkeypatch.setattr(Scatter, "fill", interrupted)
    x = images(2, 8, 8).numpy()
    preparation = Preparation((1, 8, 8), (Scatter(scales=1, angles=2, groups=3),))
    preparation(x, cache=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2
    assert names[1] == "other"


def test_large_arrays_have_no_name_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("dpoptim.data.large_arrays.MOST_IN_MEMORY", 100)
    array = room_for((10, 10))
    array[:] = 3
    assert isinstance(array, np.memmap)
    assert array.sum() == 300
    assert not list(tmp_path.iterdir())


def test_a_preparation_is_written_and_read_back() -> None:
    image = (ChannelsFirst(), Divide(255.0), SquareRoot(), UnitNorm())
    steps = (*image, OpponentColours(), Scatter(2, 4, 5), Whiten(0.5, most_planes=9))
    preparation = Preparation((8, 8), steps)
    assert Preparation.from_json(preparation.to_json()) == preparation
    with pytest.raises(ValueError, match=r"shape \(9, 9\); the model was trained on \(8, 8\)"):
        preparation(np.zeros((2, 9, 9)))
    with pytest.raises(ValueError, match="record 2 has a feature that is NaN"):
        preparation(np.stack([np.zeros((8, 8)), np.full((8, 8), np.nan)]))
