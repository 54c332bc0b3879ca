"""nn.Conv1d, nn.Conv2d, nn.Conv3d: records' weight gradients, many records at once."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dpoptim.gradients.arithmetic.batch_invariant import record_products
from dpoptim.gradients.arithmetic.multiplication import onednn_multiplies
from dpoptim.gradients.arithmetic.position_sums import never_alone
from dpoptim.gradients.arithmetic.precision import widened
from dpoptim.gradients.choose_formula import PublicSizes
from dpoptim.gradients.layers import small_convolutions
from dpoptim.gradients.layers.geometry import (
    Convolution,
    padding_inside,
    padding_outside,
    patches,
    patches_in_rows,
)
from dpoptim.gradients.layers.kernels import AFewAtOnce, ByPatches, Compiled, Formed
from dpoptim.gradients.layers.rule import LayerRule, PerSampleGrads, Saved, unbatched
from dpoptim.gradients.per_sample import fused_outer
from dpoptim.gradients.per_sample.fused_factors import Factors, FusedLayer, Sizes, way_there
from dpoptim.gradients.per_sample.lazy import Lazy
from dpoptim.gradients.per_sample.parts import flat_view, most_at_once
from dpoptim.gradients.per_sample.per_sample_grads import Dense, OneByOne
from dpoptim.runtime.torch_internals import convolution_backward

AT_LEAST, AT_MOST = 8, 32  # records in one grouped convolution
CHUNKS = 4  # that the largest pass is cut into, so that zeros are few
TOGETHER_ENTRIES = 5 << 17  # of its result: fresh memory costs more than calls
SMALLER = 2  # times as small gradients must be as what they are made of to be formed at once
# entries of a kernel for which oneDNN's products of patches are the faster way
WORTH_PATCHES = 1 << 16
CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class ConvolutionRule(LayerRule[Convolution]):
    narrow = True
    widens = True

    def prepare(self, module: Convolution, name: str, x: Tensor, rows: int | None) -> Tensor:
        if x.dim() != len(module.kernel_size) + 2:
            raise unbatched(module, name, x)
        if padding_outside(module):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            return F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
        return x

    def forward(self, module: Convolution, x: Tensor) -> tuple[Tensor, Saved]:
        compiled = small_convolutions.output(module, x)
        if compiled is not None:
            return compiled, (x, module.weight)
        output = CONVOLVE[len(module.kernel_size)](
            x,
            module.weight,
            module.bias,
            module.stride,
            padding_inside(module),
            module.dilation,
            module.groups,
        )
        return output, (x, module.weight)

    def input_gradient(self, module: Convolution, saved: Saved, g: Tensor) -> Tensor:
        x, weight = saved
        compiled = small_convolutions.input_gradient(module, x, weight, g)
        if compiled is not None:
            return compiled
        axes = len(module.kernel_size)
        return convolution_backward(
            g,
            x,
            weight,
            None,
            module.stride,
            padding_inside(module),
            module.dilation,
            False,
            [0] * axes,
            module.groups,
            [True, False, False],
        )[0]

    def forms_at_once(self, module: Convolution, saved: Saved, g: Tensor) -> bool:
        ingredients = saved[0].shape[1:].numel() + g.shape[1:].numel()
        small = SMALLER * module.weight.numel() <= ingredients
        return small and Compiled.serves(module, *widened([saved[0][:0]]))

    def per_sample_grads(self, module: Convolution, saved: Saved, g: Tensor) -> PerSampleGrads:
        x, (like,) = saved[0], widened([saved[0][:0]])
        T = g[0, 0].numel() if len(g) else 0
        by_groups = batch_invariant_in_groups(module, like)
        form: Callable[[slice, int], Tensor] = partial(
            formed_by_groups if by_groups else formed_by_patches, module, x, g
        )
        per_record = 0 if by_groups else T * x.shape[1] * module.weight[0, 0].numel()
        entries = module.weight.numel()
        singly: OneByOne | None = None
        compiled = Compiled.serves(module, like)
        if self.forms_at_once(module, saved, g):
            singly = formed = Formed.of(Compiled(module, x, g), len(g), entries)
            form = formed.part
        elif compiled:
            singly = Compiled(module, x, g)
        elif (
            entries >= WORTH_PATCHES
            and module.groups == 1
            and onednn_multiplies(like, *module.weight.flatten(1).shape)
        ):
            singly = ByPatches(module, x, g)
        elif by_groups:
            singly = AFewAtOnce(form, len(g), records_at_once(entries, AT_LEAST), entries)
        weight = Lazy(
            *(form, len(g), entries, per_record),
            singly=singly,
            at_once=most_at_once(g.device),
            at_any_size=compiled,
            there=partial(fused_layer, module, x, g) if serves_there(module, x, g) else None,
        )
        if module.bias is None:
            return {"weight": weight}
        return {
            "weight": weight,
            "bias": Dense(never_alone(*widened([g])).flatten(2).sum(2)[: len(g)]),
        }


def batch_invariant_in_groups(module: Convolution, x: Tensor) -> bool:
    """Whether grouped convolutions round each group the same: oneDNN's kernels do, others do not.

    Convolutions of a single place are matrix products anyway; so are some of three axes (up to 78
    clip norms), and all in float64 (up to 37).
    """
    onednn = x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.enabled
    return bool(onednn) and math.prod(module.kernel_size) > 1 and len(module.kernel_size) < 3


def formed_by_groups(module: Convolution, x: Tensor, g: Tensor, part: slice, most: int) -> Tensor:
    """The records' weight gradients by convolutions with every record in groups of its own.

    Always as many records at once, by public numbers, zeros making up the number: the kernel, and
    so its rounding, must not depend on how many others there are.
    """
    x, g = widened([x[part], g[part]])
    entries = module.weight.numel()
    gradients = correlations if module.in_channels == 1 else grouped_weight_gradient
    number = records_at_once(entries, most)
    if len(x) <= number:
        return gradients(module, filled_with_zeros(x, number), filled_with_zeros(g, number))[
            : len(x)
        ]
    formed = x.new_empty(len(x), entries)
    for start in range(0, len(x), number):
        rows = slice(start, start + number)
        whole = gradients(
            module, filled_with_zeros(x[rows], number), filled_with_zeros(g[rows], number)
        )
        formed[rows] = whole[: len(x) - start]
    return formed


def records_at_once(entries: int, most: int) -> int:
    """How many records of as many entries are convolved at once, in passes of ``most`` at most."""
    return power_of_two(min(max(AT_LEAST, most // CHUNKS), AT_MOST, TOGETHER_ENTRIES // entries))


def power_of_two(number: int) -> int:
    """The largest one up to ``number``, 1 at least: batches are mostly multiples of it."""
    return 1 << max(0, number.bit_length() - 1)


def filled_with_zeros(x: Tensor, records: int) -> Tensor:
    """``x`` with zeros after it to make up the number of records."""
    return x if len(x) == records else torch.cat([x, x.new_zeros(records - len(x), *x.shape[1:])])


def grouped_weight_gradient(module: Convolution, x: Tensor, g: Tensor) -> Tensor:
    axes = len(module.kernel_size)
    # only its shape is used
    weight = x.new_empty(1).expand(len(x) * module.out_channels, *module.weight.shape[1:])
    gradients = convolution_backward(
        g.reshape(1, -1, *g.shape[2:]),
        x.reshape(1, -1, *x.shape[2:]),
        weight,
        None,
        module.stride,
        padding_inside(module),
        module.dilation,
        False,
        [0] * axes,
        len(x) * module.groups,
        [False, True, False],
    )[1]
    return gradients.reshape(len(x), -1)


def correlations(module: Convolution, x: Tensor, g: Tensor) -> Tensor:
    """As `grouped_weight_gradient`, for one input channel: output gradients slid over records.

    For speed alone: steps of networks whose first layer dominates take 5 to 25 % less; with more
    channels it is slower. It rounds a record as `formed_by_groups` says, the same anywhere, with 1
    to 64 threads (`tests/privacy/test_clipped_sum_sensitivity.py`).
    """
    slid = CONVOLVE[len(module.kernel_size)](
        x.transpose(0, 1),  # (1, b, space...)
        g.flatten(0, 1)[:, None],  # (b * p, 1, positions...)
        None,
        # what lies between entries of the kernel and between positions changes roles
        module.dilation,
        padding_inside(module),
        module.stride,
        groups=len(x),
    )
    for axis, size in enumerate(module.kernel_size, 2):
        slid = slid.narrow(axis, 0, size)  # strides may have left entries at the edge unused
    return slid.reshape(len(x), -1)


def serves_there(module: Convolution, x: Tensor, g: Tensor) -> bool:
    """Whether an accelerator measures and adds such gradients in `fused_outer`."""
    return module.groups == 1 and all(map(fused_outer.serves, (x, g)))


def fused_layer(module: Convolution, x: Tensor, g: Tensor, public: PublicSizes) -> FusedLayer:
    """The layer as a product of output gradients and patches, which are made when needed."""
    p, d = module.weight.flatten(1).shape
    sizes = Sizes(len(g), p, d, torch.promote_types(x.dtype, g.dtype), g.device)

    def form() -> Factors:
        return Factors.of(g.flatten(2).mT, patches_in_rows(x, module))

    way = way_there(public, public.positions, p, d, sizes.dtype)
    return FusedLayer(way, sizes, form, numbers=g[:, 0].numel() * (p + d))


def formed_by_patches(module: Convolution, x: Tensor, g: Tensor, part: slice, most: int) -> Tensor:
    """The records' weight gradients as products of output gradients and unfolded patches."""
    x, g = widened([x[part], g[part]])
    # (b, T, p), (b, T, G * features)
    left, right = g.flatten(2).transpose(1, 2), patches(x, module)
    G = module.groups
    if G == 1:
        return flat_view(record_products(left, right))
    # (b * G, T, ...)
    lefts, rights = (t.unflatten(2, (G, -1)).transpose(1, 2).flatten(0, 1) for t in (left, right))
    return record_products(lefts, rights).reshape(len(left), -1)
