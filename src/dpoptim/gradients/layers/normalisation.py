"""Layers that normalise: gradients of their weights are sums over a record's positions.

BatchNorm, SyncBatchNorm and InstanceNorm may normalise by statistics that they hold. In evaluation
mode they map each channel of a record by two public numbers, and are as private as GroupNorm. In
training mode they normalise records by their batch, or write what they saw of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpoptim.gradients.arithmetic.position_sums import sum_normalised
from dpoptim.gradients.layers.rule import LayerRule, Module, PerSampleGrads, Saved
from dpoptim.gradients.per_sample.per_sample_grads import Dense
from dpoptim.runtime.torch_internals import group_norm_backward, layer_norm_backward

InstanceNorm = nn.modules.instancenorm._InstanceNorm
Normalisation = nn.modules.batchnorm._BatchNorm | InstanceNorm
InGroups = nn.GroupNorm | InstanceNorm


def summed_over_positions(
    x: Tensor, mean: Tensor | None, scale: Tensor, g: Tensor, normalised: int
) -> tuple[Tensor, Tensor]:
    """Sum ``(x - mean) * scale * g`` and g, (B, positions..., normalised...), over the positions.

    Args:
        mean, scale: with size 1 in the normalised axes; no mean: zero.
        normalised: how many axes are.
    """
    records, axes = len(g), g.shape[g.dim() - normalised :]
    positions = g.shape[1 : g.dim() - normalised].numel()
    x, g = (each.reshape(records, positions, axes.numel()) for each in (x, g))
    if mean is not None:
        mean = mean.reshape(records, positions)
    scaled, whole = sum_normalised(x, mean, scale.reshape(records, positions), g)
    return scaled.view(records, *axes), whole.view(records, *axes)


class LayerNormRule(LayerRule[nn.LayerNorm]):
    at_once = True

    def axes(self, module: nn.LayerNorm) -> int:
        return len(module.normalized_shape) + 1

    def forward(self, module: nn.LayerNorm, x: Tensor) -> tuple[Tensor, Saved]:
        output, mean, rstd = torch.native_layer_norm(
            x, module.normalized_shape, module.weight, module.bias, module.eps
        )
        return output, (x, mean, rstd, module.weight)

    def input_gradient(self, module: nn.LayerNorm, saved: Saved, g: Tensor) -> Tensor:
        x, mean, rstd, weight = saved
        return layer_norm_backward(
            g, x, module.normalized_shape, mean, rstd, weight, None, [True, False, False]
        )[0]

    def per_sample_grads(self, module: nn.LayerNorm, saved: Saved, g: Tensor) -> PerSampleGrads:
        x, mean, rstd, _ = saved
        weight, bias = summed_over_positions(x, mean, rstd, g, len(module.normalized_shape))
        return {"weight": Dense(weight), "bias": Dense(bias)}


class RMSNormRule(LayerRule[nn.RMSNorm]):
    at_once = True

    def axes(self, module: nn.RMSNorm) -> int:
        return len(module.normalized_shape) + 1

    def prepare(self, module: nn.RMSNorm, name: str, x: Tensor, rows: int | None) -> Tensor:
        # its means round by place in other layouts
        return super().prepare(module, name, x, rows).contiguous()

    def forward(self, module: nn.RMSNorm, x: Tensor) -> tuple[Tensor, Saved]:
        eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
        axes = tuple(range(-len(module.normalized_shape), 0))
        rstd = (x.square().mean(axes, keepdim=True) + eps).rsqrt()
        return x * rstd * module.weight, (x, rstd, module.weight)

    def input_gradient(self, module: nn.RMSNorm, saved: Saved, g: Tensor) -> Tensor:
        x, rstd, weight = saved
        axes = tuple(range(-len(module.normalized_shape), 0))
        scaled, normalised = g * weight, x * rstd
        return rstd * (scaled - normalised * (scaled * normalised).mean(axes, keepdim=True))

    def per_sample_grads(self, module: nn.RMSNorm, saved: Saved, g: Tensor) -> PerSampleGrads:
        x, rstd, _ = saved
        return {
            "weight": Dense(
                summed_over_positions(x, None, rstd, g, len(module.normalized_shape))[0]
            )
        }


class ChannelsRule(LayerRule[Module]):
    """Layers with a weight and a bias for each channel, the second axis."""

    at_once = True

    def axes(self, module: Any) -> int:
        return module._get_no_batch_dim() + 1 if isinstance(module, InstanceNorm) else 2

    def prepare(self, module: Any, name: str, x: Tensor, rows: int | None) -> Tensor:
        x = super().prepare(module, name, x, rows)
        if not isinstance(module, nn.GroupNorm):
            module._check_input_dim(x)
        return x.contiguous()


class GroupNormRule(ChannelsRule[InGroups]):
    """Serves InstanceNorm, too, where it holds no statistics: see `RunningStatisticsRule`."""

    def forward(self, module: InGroups, x: Tensor) -> tuple[Tensor, Saved]:
        B, C, positions = x.shape[0], x.shape[1], x[0, 0].numel() if x.shape[0] else 1
        output, mean, rstd = torch.native_group_norm(
            x, module.weight, module.bias, B, C, positions, groups_of(module), module.eps
        )
        return output, (x, mean, rstd, module.weight)

    def input_gradient(self, module: InGroups, saved: Saved, g: Tensor) -> Tensor:
        return backward_in_groups(module, saved, g, [True, False, False])[0].view_as(g)

    def per_sample_grads(self, module: InGroups, saved: Saved, g: Tensor) -> PerSampleGrads:
        _, *formed = backward_in_groups(module, saved, g, [False, True, True])
        return by_channel(formed, g)

    def all_gradients(
        self, module: InGroups, saved: Saved, g: Tensor
    ) -> tuple[Tensor, PerSampleGrads]:
        x_gradient, *formed = backward_in_groups(module, saved, g, [True, True, True])
        return x_gradient.view_as(g), by_channel(formed, g)


def groups_of(module: InGroups) -> int:
    """Groups of channels that are normalised together; one channel each in InstanceNorm."""
    return module.num_groups if isinstance(module, nn.GroupNorm) else module.num_features


def backward_in_groups(
    module: InGroups, saved: Saved, g: Tensor, wanted: list[bool]
) -> Sequence[Tensor]:
    """PyTorch's gradients of input, weight and bias, with the channels of all records as one's.

    What it sums over records is then one record's own, channel by channel: (1, B C, positions),
    (B C,) and (B C,). It needs the sums over positions for the input's gradient anyway.

    **Guarantee.** A record's numbers are functions of its own rows, to the last bit, whoever else
    is in the batch and with any number of threads (tested: kernels are the vendor's).
    """
    x, mean, rstd, weight = saved
    B, C = x.shape[:2]
    # three axes, which lie in one way only
    x, g = (each.reshape(1, B * C, -1) for each in (x, g.contiguous()))
    mean, rstd, weight = mean.view(1, -1), rstd.view(1, -1), weight.repeat(B)
    in_groups = 1, B * C, x.shape[2], B * groups_of(module)
    return group_norm_backward(g, x, mean, rstd, weight, *in_groups, wanted)


def by_channel(formed: Sequence[Tensor], g: Tensor) -> PerSampleGrads:
    """Gradients of weight and bias, (B C,) each, by record."""
    weight, bias = (each.view(g.shape[:2]) for each in formed)
    return {"weight": Dense(weight), "bias": Dense(bias)}


class RunningStatisticsRule(ChannelsRule[Normalisation]):
    """For layers that `holds_statistics`; that they are in evaluation mode, `ModeHook` sees to.

    **Guarantee.** A record's numbers are functions of its own rows, and of statistics that no
    forward pass writes.
    """

    def forward(self, module: Normalisation, x: Tensor) -> tuple[Tensor, Saved]:
        mean, variance = (module.get_buffer(f"running_{each}") for each in ("mean", "var"))
        output = F.batch_norm(x, mean, variance, module.weight, module.bias, False, 0.0, module.eps)
        rstd = (variance + module.eps).rsqrt()
        return output, (x, mean, rstd, module.weight * rstd)

    def input_gradient(self, module: Normalisation, saved: Saved, g: Tensor) -> Tensor:
        return g * spread_over(saved[3], g)

    def per_sample_grads(self, module: Normalisation, saved: Saved, g: Tensor) -> PerSampleGrads:
        x, mean, rstd, _ = saved
        channels = g.shape[0] * g.shape[1]
        centred = (x - spread_over(mean, x)).reshape(1, channels, -1)
        # by the kernel that sums over the positions of GroupNorm, with each channel of each record
        # a group that is centred already
        scale = rstd.repeat(len(g))
        _, *formed = group_norm_backward(
            g.contiguous().view(1, channels, -1),
            *(centred, centred.new_zeros(1, channels), scale.view(1, -1), scale),
            *(1, channels, centred.shape[2], channels),
            [False, True, True],
        )
        return by_channel(formed, g)


def sees_batch(module: Normalisation) -> bool:
    """Whether a forward pass, as it is now, would normalise by the batch, or keep what it saw."""
    if isinstance(module, InstanceNorm):
        return module.track_running_stats and module.training
    return module.training or module.running_mean is None or module.running_var is None


def holds_statistics(module: nn.Module) -> bool:
    """Whether a layer normalises by statistics that it holds, if it runs in evaluation mode.

    One whose forward pass is another class's may do anything.
    """
    if isinstance(module, InstanceNorm):
        return module.track_running_stats and type(module).forward is InstanceNorm.forward
    own = nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and type(module).forward in own


def spread_over(numbers: Tensor, x: Tensor) -> Tensor:
    """One number for each channel, with the axes of ``x``."""
    return numbers.view(-1, *[1] * (x.dim() - 2))
