"""Adam less the noise's variance in the second moment (Tang et al. 2023, "DP-AdamBC")."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.arguments import number_from_zero, positive_number

ERRORS = 2  # standard errors, by which a second moment may be larger than it seems


class AdamBC(torch.optim.Optimizer):
    """Adam for noisy gradients: the noise's variance is taken off the second moment.

    That noise enlarges second moments equally, which makes Adam SGD; its variance is public. What
    is left is known to a standard error, likewise public, that is large while steps are few: the
    root is of the largest second moment that the gradients may have within two of these, ``max(v -
    noise variance, 0) + 2 standard errors``. Each tensor is moved as far as Adam moves it
    (learning-rate grafting, Agarwal et al. 2020): entries that are noise alone would else go
    farther, in a tensor of no signal, as an adapter's is at first, all of them. So Adam's learning
    rates serve, and without noise it is Adam. Post-processing of what was released: it costs no
    privacy. Inside `dpoptim.attach` the noise of each release is passed on by itself
    (``noise_std`` of the parameter groups).

    Args:
        params: parameters, or groups of them.
        lr: learning rate, > 0.
        betas: decays of the two moments, in [0, 1).
        eps: added to the root, as in Adam; >= 0.
        floor: the least that is added, in units of the noise's variance; >= 0. In the first t
            steps the two standard errors are more: 2 sqrt(2 / t) of it. Large: the entries of a
            tensor move in proportion to ``m``.
        weight_decay: decoupled, as in AdamW; >= 0.
        noise_std: of the noise in every entry of the gradients, until `attach` says otherwise.

    Attributes:
        noise_shares: what each parameter has of ``noise_std``, where it differs (see
            `ScaledClipNorm`); empty: 1. `attach` says it.

    Examples:
        >>> import torch
        >>> from dpoptim.optim import AdamBC
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = AdamBC(model.parameters(), lr=0.01)  # `attach` tells it the noise
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        floor: float = 0.1,
        weight_decay: float = 0.0,
        noise_std: float = 0.0,
    ) -> None:
        for name, value in zip(("betas[0]", "betas[1]"), betas, strict=True):
            if not 0 <= number_from_zero(name, value) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value!r}.")
        defaults = {
            "lr": positive_number("lr", lr),
            "betas": betas,
            "eps": number_from_zero("eps", eps),
            "floor": number_from_zero("floor", floor),
            "weight_decay": number_from_zero("weight_decay", weight_decay),
            "noise_std": number_from_zero("noise_std", noise_std),
        }
        super().__init__(params, defaults)
        self.noise_shares: Mapping[nn.Parameter, float] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the parameters that have gradients; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, p.grad, group)
        return loss

    def _move(self, p: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"], state["variance"], state["squares"] = 0, 0.0, 0.0
            state["first"], state["second"] = torch.zeros_like(p), torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        state["first"].lerp_(gradient, 1 - beta1)
        state["second"].lerp_(gradient.square(), 1 - beta2)
        # Weighted over the steps as the second moment is: the noise may differ from step to step.
        noise = group["noise_std"] * (self.noise_shares[p] if self.noise_shares else 1.0)
        state["variance"] = beta2 * state["variance"] + (1 - beta2) * noise**2
        state["squares"] = beta2**2 * state["squares"] + (1 - beta2) ** 2
        correction = 1 - beta2 ** state["step"]
        variance = state["variance"] / correction
        # The weights' squares say how few steps the second moment is a mean of, and so how far
        # noise alone takes it from the noise's variance: a standard deviation of it.
        doubt = math.sqrt(2 * state["squares"]) / correction
        margin = max(group["floor"], ERRORS * doubt) * variance
        mean = state["first"] / (1 - beta1 ** state["step"])
        second = state["second"] / correction
        adam = mean / (second.sqrt() + group["eps"])
        most = (second - variance).clamp_(min=0).add_(margin)
        debiased = mean / (most.sqrt_() + group["eps"])
        if group["weight_decay"] > 0:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        nothing = torch.finfo(debiased.dtype).tiny
        p.sub_(debiased * (group["lr"] * adam.norm() / debiased.norm().clamp(min=nothing)))


def pass_on(
    optimizers: Iterable[torch.optim.Optimizer],
    noise_std: float,
    noise_shares: Mapping[nn.Parameter, float],
) -> None:
    """Tell optimizers with a ``noise_std`` of their own how noisy a release is.

    Args:
        noise_shares: what each parameter has of it; empty: 1.
    """
    for optimizer in optimizers:
        if "noise_std" in optimizer.defaults:
            if math.isnan(noise_std):
                raise ValueError(
                    f"{type(optimizer).__name__} asks for the noise of each step, which this noise "
                    "does not tell. Fix: noise='best' or 'independent', or another optimizer."
                )
            for group in optimizer.param_groups:
                group["noise_std"] = noise_std
            optimizer.noise_shares = noise_shares  # type: ignore[attr-defined]
