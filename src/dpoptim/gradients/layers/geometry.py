"""Places of a convolution's patches."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Axes = tuple[int, ...]  # a number for each of three axes


def output_size(module: Convolution, padded: Sequence[int]) -> tuple[int, ...]:
    """Output positions along each axis of an input that is padded already."""
    return output_positions(padded, module.kernel_size, module.stride, module.dilation)


def output_positions(
    padded: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    return tuple(
        (size - gap * (k - 1) - 1) // step + 1
        for size, k, gap, step in zip(padded, kernel, dilation, stride, strict=True)
    )


def patches(x: Tensor, module: Convolution) -> Tensor:
    """Unfold (b, C, space...) into (b, positions, C * kernel entries), as weights are flattened.

    One strided copy: twice as fast as ``F.unfold``, which walks through the records one by one.
    It has the positions of an entry one after the other.
    """
    image = windows(x, module)
    axes = len(module.kernel_size)
    return image.flatten(1, axes + 1).flatten(2).transpose(1, 2)


def patches_in_rows(x: Tensor, module: Convolution) -> Tensor:
    """As `patches`, with the entries of a position one after the other."""
    image = windows(x, module)
    axes = len(module.kernel_size)
    in_rows = image.permute(0, *range(axes + 2, 2 * axes + 2), *range(1, axes + 2))
    return in_rows.flatten(1, axes).flatten(2)


def windows(x: Tensor, module: Convolution) -> Tensor:
    """View of (b, C, space...), padded, as (b, C, kernel..., positions...)."""
    padding = [side for axis in reversed(padding_inside(module)) for side in (axis, axis)]
    image = F.pad(x, padding) if any(padding) else x
    positions = output_size(module, image.shape[2:])
    records, channels, *space = image.stride()
    inside = [gap * stride for gap, stride in zip(module.dilation, space, strict=True)]
    between = [step * stride for step, stride in zip(module.stride, space, strict=True)]
    return image.as_strided(
        (*image.shape[:2], *module.kernel_size, *positions),
        (records, channels, *inside, *between),
        image.storage_offset(),
    )


def padding_outside(module: Convolution) -> bool:
    """Whether padding comes before the layer: values other than zero, or a lopsided 'same'."""
    return module.padding_mode != "zeros" or isinstance(module.padding, str)


def padding_inside(module: Convolution) -> tuple[int, ...]:
    if padding_outside(module) or isinstance(module.padding, str):
        return (0,) * len(module.kernel_size)
    return tuple(module.padding)


def padded_size(module: Convolution, size: Sequence[int]) -> list[int]:
    """The size of an input with the zeros that the layer puts around it."""
    return [s + 2 * side for s, side in zip(size, padding_inside(module), strict=True)]


def geometry(
    module: Convolution, size: Sequence[int]
) -> tuple[int, int, Axes, Axes, Axes, Axes, Axes]:
    """Channels and outputs, and of three axes the size, padding, kernel, stride and dilation."""
    padding = padding_inside(module)
    return (
        *(module.in_channels, module.out_channels, three_axes(size, 1), three_axes(padding, 0)),
        *(three_axes(module.kernel_size, 1), three_axes(module.stride, 1)),
        three_axes(module.dilation, 1),
    )


def three_axes(values: Sequence[int], missing: int) -> Axes:
    """A number for each of three axes; ``missing`` for the first ones, if there are fewer."""
    return (*[missing] * (3 - len(values)), *values)
