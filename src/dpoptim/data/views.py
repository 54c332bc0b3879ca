"""Several views of a record: augmentation, averaged and clipped once, at no privacy cost."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dpoptim.arguments import whole_number
from dpoptim.runtime.torch_internals import pytree


class Views(Dataset[Any]):
    """Made by `views`."""

    def __init__(self, dataset: Dataset[Any], transform: Callable[[Any], Any], K: int) -> None:
        self.dataset, self._transform, self._K = dataset, transform, K

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        """The record's input, K times transformed, (K, ...), and K times the rest of it."""
        record = self.dataset[index]
        pair = isinstance(record, tuple | list)
        x, rest = (record[0], tuple(record[1:])) if pair else (record, ())
        seen = torch.stack([torch.as_tensor(self._transform(x)) for _ in range(self._K)])
        shared = pytree.tree_map(
            lambda t: t.expand(self._K, *t.shape) if isinstance(t, Tensor) else t, rest
        )
        return (seen, *shared) if pair else seen


def views(dataset: Dataset[Any], transform: Callable[[Any], Any], K: int) -> Dataset[Any]:
    """A data set of K views a record, for ``dpoptim.attach(..., rows_per_record=K)``.

    Augmentation multiplicity (De et al. 2022): a record's gradient is the mean over its views,
    clipped once. So views lower its variance at the same guarantee; a step takes at most K times
    as long. ::

        train = dpoptim.data.views(train_set, transforms.RandomCrop(32, padding=4), 8)
        with dpoptim.attach(plan, model, optimizer, train, rows_per_record=8) as private: ...

    Args:
        dataset: a map-style data set of inputs, or of tuples that start with the input.
        transform: maps an input to a view of it, a tensor (or what becomes one) of one shape for
            all views. It may draw from torch's generators; it must depend on nothing but its input
            and that.
        K: views of each record, at least 1.

    Returns:
        a data set of the same length.

    Raises:
        ValueError, TypeError: K is no whole number of 1 or more.

    **Guarantee.** None: views are as private as the record, and depend on no other.

    Examples:
        >>> import torch
        >>> from dpoptim.data import views
        >>> images = torch.utils.data.TensorDataset(torch.rand(10, 1, 8, 8), torch.arange(10))
        >>> def shifted(image):
        ...     return image.roll(int(torch.randint(-1, 2, ())), dims=2)
        >>> views(images, shifted, K=4)[0][0].shape
        torch.Size([4, 1, 8, 8])
    """
    K = whole_number("K", K, least=1)
    if not callable(transform):
        raise TypeError(
            f"transform must be callable, got {type(transform).__name__}; such as torchvision's "
            "transforms."
        )
    return Views(dataset, transform, K)


def repeat_records(x: Tensor, K: int) -> Tensor:
    """``x`` (n, ...) with every record K times, (n, K, ...), in the same memory; itself for one."""
    return x[:, None].expand(-1, K, *x.shape[1:]) if K > 1 else x


def moved_images(
    images: Tensor, pixels: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """Move each image by up to so many pixels down and across, by itself.

    What comes in at the border has the image's lowest value.

    Args:
        images: (rows, channels, height, width).
        pixels: the farthest, either way, at least 0.
        generator: to draw from; None: torch's own, which `attach` keeps secret.

    **Guarantee.** None: a row's result depends on the row, and on draws that know nothing of any
    record. (One record more shifts the draws of those behind it, to others of the same
    distribution; so neighbours' draws can be paired row by row, and the bound on a record's
    gradient holds for each pair.)
    """
    rows, channels, height, width = images.shape
    padded = images.amin((1, 2, 3), keepdim=True).repeat(
        1, channels, height + 2 * pixels, width + 2 * pixels
    )
    padded[:, :, pixels : pixels + height, pixels : pixels + width] = images
    down, right = torch.randint(0, 2 * pixels + 1, (2, rows, 1, 1, 1), generator=generator)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (rows, channels, down, right, ...)
    return windows[torch.arange(rows), :, down.view(-1), right.view(-1)]
