"""BatchNorm, SyncBatchNorm and InstanceNorm that normalise by the statistics they hold.

In evaluation mode they map each channel of a record by two public numbers, and are as private as
GroupNorm. In training mode they normalise records by their batch, or write what they saw of them.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from dpoptim.gradients.layers.rule import LayerRule, PerSampleGrads, Saved, refuse_unbatched
from dpoptim.gradients.per_sample.per_sample_grads import Dense
from dpoptim.runtime.torch_internals import group_norm_backward

InstanceNorm = nn.modules.instancenorm._InstanceNorm
Normalisation = nn.modules.batchnorm._BatchNorm | InstanceNorm


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


class RunningStatisticsRule(LayerRule[Normalisation]):
    """For layers that `holds_statistics`; that they are in evaluation mode, `ModeHook` sees to.

    **Guarantee.** A record's numbers are functions of its own rows, and of statistics that no
    forward pass writes.
    """

    at_once = True

    def prepare(self, module: Normalisation, name: str, x: Tensor, rows: int | None) -> Tensor:
        axes = module._get_no_batch_dim() + 1 if isinstance(module, InstanceNorm) else 2
        refuse_unbatched(name, type(module).__name__, x, axes)
        module._check_input_dim(x)
        return x.contiguous()

    def forward(self, module: Normalisation, x: Tensor) -> tuple[Tensor, Saved]:
        mean, variance = (module.get_buffer(f"running_{each}") for each in ("mean", "var"))
        output = F.batch_norm(x, mean, variance, module.weight, module.bias, False, 0.0, module.eps)
        rstd = (variance + module.eps).rsqrt()
        return output, (x, mean, rstd, module.weight * rstd)

    def input_gradient(self, module: Normalisation, saved: Saved, g: Tensor) -> Tensor:
        return g * by_channel(saved[3], g)

    def per_sample_grads(self, module: Normalisation, saved: Saved, g: Tensor) -> PerSampleGrads:
        x, mean, rstd, _ = saved
        channels = g.shape[0] * g.shape[1]
        centred = (x - by_channel(mean, x)).reshape(1, channels, -1)
        # by the kernel that sums over the positions of GroupNorm, with each channel of each record
        # a group that is centred already
        scale = rstd.repeat(len(g))
        _, weight, bias = group_norm_backward(
            g.contiguous().view(1, channels, -1),
            *(centred, centred.new_zeros(1, channels), scale.view(1, -1), scale),
            *(1, channels, centred.shape[2], channels),
            [False, True, True],
        )
        return {"weight": Dense(weight.view(g.shape[:2])), "bias": Dense(bias.view(g.shape[:2]))}


def by_channel(numbers: Tensor, x: Tensor) -> Tensor:
    """One number for each channel, with the axes of ``x``."""
    return numbers.view(-1, *[1] * (x.dim() - 2))
