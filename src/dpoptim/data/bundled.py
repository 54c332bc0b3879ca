"""Public data sets: scikit-learn's digits, and Fashion-MNIST from its IDX files."""

from collections.abc import Sequence
from pathlib import Path

from dpoptim.data.arrays import PIXELS, from_arrays
from dpoptim.data.dataset import Data, hold_out_fifth
from dpoptim.data.idx import read_idx_folder
from dpoptim.data.npz_files import Arrays, as_text
from dpoptim.data.preparation import ChannelsFirst, Divide, Step

# Debian's package dataset-fashion-mnist
FASHION_MNIST_DIRECTORY = "/usr/share/datasets/fashion-mnist"
GARMENTS = (
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


def load_digits(seed: int = 0, steps: Sequence[Step] = (), cache: Path | None = None) -> Data:
    """Load scikit-learn's 1,797 digits (8 x 8), a fifth held out at random by ``seed``.

    Args:
        steps: applied to each image once its pixels are in [0, 1].
        cache: see `Preparation`.
        seed: of the hold-out.

    Examples:
        >>> from dpoptim.data import load_digits
        >>> load_digits().x.shape[1:]
        (1, 8, 8)

    Returns:
        images of shape (1, 8, 8), pixels in [0, 1].
    """
    from sklearn.datasets import load_digits as bundled

    images, labels = bundled(return_X_y=True)
    arrays = Arrays(images.reshape(-1, 8, 8), as_text(labels), None, None)
    steps = (ChannelsFirst(), Divide(16.0), *steps)
    return hold_out_fifth(
        from_arrays(
            "digits", "digits", arrays, classes=None, public=True, steps=steps, cache=cache
        ),
        seed,
    )


def load_fashion_mnist(
    directory: str | Path = FASHION_MNIST_DIRECTORY,
    steps: Sequence[Step] = (),
    cache: Path | None = None,
) -> Data:
    """Load Fashion-MNIST (60,000 + 10,000 images, 28 x 28) from four IDX files, gzipped or not.

    Args:
        steps: applied to each image once its pixels are in [0, 1].
        cache: see `Preparation`.
        directory: of the four files.

    Returns:
        images of shape (1, 28, 28), pixels in [0, 1].

    Raises:
        FileNotFoundError: a file is missing; says which, and how to get it.
        ValueError: a file is not in the IDX format, or images and labels do not match.

    Examples:
        >>> from dpoptim.data import load_fashion_mnist
        >>> try:
        ...     load_fashion_mnist("nowhere")
        ... except FileNotFoundError:
        ...     print("the message says how to get it")
        the message says how to get it
    """
    arrays = read_idx_folder(Path(directory))
    for part, labels in (("train", arrays.labels), ("test", arrays.labels_test)):
        if not labels or not set(labels) <= {str(digit) for digit in range(10)}:
            raise ValueError(
                f"{directory}: the {part} labels are not 0..9; these are not Fashion-MNIST's files."
            )
    named = Arrays(
        arrays.x, garments(arrays.labels), arrays.x_test, garments(arrays.labels_test or [])
    )
    steps = (*PIXELS, *steps)
    return from_arrays(
        str(directory),
        "fashion-mnist",
        named,
        classes=GARMENTS,
        public=True,
        steps=steps,
        cache=cache,
    )


def garments(labels: list[str]) -> list[str]:
    return [GARMENTS[int(label)] for label in labels]
