"""Bounds on each record's gradient, known after the forward pass (Fang et al. 2023, App. D).

For ``h_i = phi_i(W_i h_{i-1} + b_i)``, i = 1..H, and a loss f of the output h_H,

    |d f / d (W_i, b_i)| <= |(h_{i-1}, 1)| Lip(phi_i) (prod_{j > i} Lip(phi_j) |W_j|_2) |d f / d
    h_H|,

since the derivative by ``W_i h_{i-1} + b_i`` comes from the output through the later layers alone.
The activations are those that the forward pass has computed; ``|d f / d h_H|`` is measured
(``"sharp"``) or replaced by the paper's bound for softmax cross-entropy, ``2 sqrt(min(1, 2 f))``
(``"paper"``), which uses products of spectral norms for the activations, too. As printed the paper
leaves out the biases; without the terms for them its bound is false.
"""

import math
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from dpoptim.errors import PrivacyError
from dpoptim.gradients.hooks.refusals import refuse_wrapped
from dpoptim.runtime.torch_internals import any_global_hook, gradient_hooks, module_hooks

# up to this many rows or columns a spectral norm is an eigenvalue; beyond, squarings bound it
EXACT_SIDE = 64
SQUARINGS = 6  # bound the norm of a matrix with r rows up to a factor r^(1/128): 4 % at r = 256
LARGEST_WEIGHT = 2.0**19
LARGEST_REACH = 2.0**50
# of float64 products and eigenvalues, whose relative errors are far smaller
ROUNDING = 1 + 2.0**-20


@dataclass(frozen=True)
class Layer:
    """A linear layer, and the largest slope of the activations up to the next one."""

    linear: nn.Linear
    slope: float
    at_zero: float  # the largest |phi(0)| of an entry of what follows


def layers_of(model: nn.Module, ours: Collection[int] = ()) -> list[Layer]:
    """The layers of a chain of linear layers and activations.

    Args:
        ours: ids of hooks that are the engine's own.

    Raises:
        PrivacyError: anything else, by name: there is no proof for it.
    """
    if any_global_hook():
        raise PrivacyError(
            "hooks on all modules are set, which may change what layers compute. Fix: remove them."
        )
    layers: list[Layer] = []
    for name, module in leaves(model, "", ours):
        if type(module) is nn.Linear:
            if any(layer.linear is module for layer in layers):
                raise PrivacyError(
                    f"layer {name!r} is used twice: no bound is proved for that. Fix: "
                    "dpoptim.DPSGD."
                )
            layers.append(Layer(module, 1.0, 0.0))
            continue
        slope, at_zero = activation(name, module)
        if layers:
            last = layers[-1]
            layers[-1] = Layer(last.linear, last.slope * slope, slope * last.at_zero + at_zero)
    if not layers:
        raise PrivacyError("the model has no nn.Linear layer to train. Fix: dpoptim.DPSGD.")
    parameters = [id(p) for layer in layers for p in layer.linear.parameters()]
    if len(parameters) != len(set(parameters)):
        raise PrivacyError(
            "layers share parameters: no bound is proved for that. Fix: dpoptim.DPSGD."
        )
    return layers


def leaves(module: nn.Module, name: str, ours: Collection[int]) -> list[tuple[str, nn.Module]]:
    """The chain of an nn.Sequential, nested ones spread out."""
    label = name or type(module).__name__
    refuse_hooks(module, label, ours)
    if type(module) is not nn.Sequential:
        return [(label, module)]
    # named_children() would leave out repeated ones
    children = zip(module._modules, module, strict=True)
    return [
        leaf
        for key, child in children
        for leaf in leaves(child, f"{name}.{key}" if name else key, ours)
    ]


def refuse_hooks(module: nn.Module, label: str, ours: Collection[int]) -> None:
    """Refuse whatever changes what a module computes forwards or backwards."""
    refuse_wrapped(module, label)
    foreign = any(key not in ours for key in module_hooks(module))
    if (
        foreign
        or is_parametrized(module)
        or any(gradient_hooks(p) for p in module._parameters.values() if p is not None)
    ):
        raise PrivacyError(
            f"module {label!r} has hooks or parametrisations, which may change what it computes or "
            "its gradient. Fix: remove them, also those on its parameters."
        )


def fixed_slope(slope: float, at_zero: float = 0.0) -> Callable[[Any], tuple[float, float]]:
    return lambda module: (slope, at_zero)


# From a module to its largest slope, not finite if it has none (`max` keeps a NaN that comes
# first), and its largest value at 0.
ACTIVATIONS: dict[type[nn.Module], Callable[[Any], tuple[float, float]]] = {
    nn.Identity: fixed_slope(1.0),
    nn.ReLU: fixed_slope(1.0),
    nn.ReLU6: fixed_slope(1.0),
    nn.Tanh: fixed_slope(1.0),
    nn.Sigmoid: fixed_slope(0.25, 0.5),
    nn.Softsign: fixed_slope(1.0),
    nn.GELU: fixed_slope(1.13),
    nn.SiLU: fixed_slope(1.1),
    nn.Flatten: lambda m: (1.0 if (m.start_dim, m.end_dim) == (1, -1) else math.nan, 0.0),
    nn.Dropout: lambda m: (1 / (1 - m.p) if m.p < 1 else math.nan, 0.0),
    nn.LeakyReLU: lambda m: (max(abs(m.negative_slope), 1.0), 0.0),
    nn.ELU: lambda m: (max(abs(m.alpha), 1.0), 0.0),
    nn.Hardtanh: lambda m: (1.0, abs(min(max(0.0, m.min_val), m.max_val))),
}


def activation(name: str, module: nn.Module) -> tuple[float, float]:
    """The largest slope of a module that works entry by entry, and its largest value at 0."""
    kind = type(module)  # exactly: a subclass may compute anything
    slope, at_zero = ACTIVATIONS[kind](module) if kind in ACTIVATIONS else (math.nan, 0.0)
    if math.isfinite(slope):
        return slope, at_zero
    known = ", ".join(["Linear", *(each.__name__ for each in ACTIVATIONS)])
    raise PrivacyError(
        f"module {name!r} is a {kind.__name__}, for which no bound on gradients is proved. Value "
        f"clipping takes chains (nn.Sequential) of {known}. Fix: dpoptim.DPSGD, which clips any "
        "module's gradients."
    )


def stays_in_range(layers: list[Layer], norms: list[float]) -> bool:
    """Whether short records stay in the float32 range, by the weights alone, hence public.

    Args:
        norms: of the weights, from `spectral_norm`; the first one is not used.
    """
    for layer in layers:
        parameters = [
            float(torch.linalg.vector_norm(p.detach())) for p in layer.linear.parameters()
        ]
        if (
            not max(1.0, layer.slope) * max(parameters) <= LARGEST_WEIGHT
            or not layer.at_zero <= LARGEST_WEIGHT
        ):
            return False  # also where they are NaN
    steepest, later = 1.0, 1.0
    for layer, norm in reversed(list(zip(layers, norms, strict=True))):
        later *= layer.slope
        steepest = max(steepest, later)
        later *= norm
    return steepest <= LARGEST_REACH


def spectral_norm(weight: Tensor) -> float:
    """At least a matrix's largest singular value, and hardly more; infinite if not finite."""
    rows, columns = weight.shape
    matrix = weight.detach().double()
    largest_entry = float(matrix.abs().max())
    if not 0 < largest_entry < math.inf:
        return 0.0 if largest_entry == 0 else math.inf
    matrix = matrix / largest_entry  # squares of entries stay in range
    gram = matrix @ matrix.T if rows <= columns else matrix.T @ matrix
    size = float(gram.diagonal().sum())
    gram = gram / size  # eigenvalues in [0, 1]
    if len(gram) <= EXACT_SIDE:
        largest = float(torch.linalg.eigvalsh(gram)[-1]) + 2.0**-40
    else:
        # largest^(2^t) <= |gram^(2^t)|_F, kept in range by factoring it out
        power, exponent = 1.0, 0.0
        for _ in range(SQUARINGS):
            gram = gram @ gram
            power *= 2
            scale = float(gram.norm())
            gram = gram / scale
            exponent += math.log(scale) / power
        largest = math.exp(exponent)
    return largest_entry * math.sqrt(size * min(largest, 1.0)) * ROUNDING


class SpectralNorms:
    """`spectral_norm` of slowly moving weights: ``|W| <= |W_0| + |W - W_0|_F``, W_0 an earlier one.

    Args:
        weights: matrices; copies of them are kept.
        slack: share by which a bound may exceed ``|W_0|`` before it is computed anew.
    """

    def __init__(self, weights: list[Tensor], slack: float = 0.1) -> None:
        self._weights, self._slack = weights, slack
        self._known: list[tuple[Tensor, float] | None] = [None] * len(weights)

    def __getitem__(self, place: int) -> float:
        weight, known = self._weights[place].detach(), self._known[place]
        if min(weight.shape) > EXACT_SIDE and known is not None:
            moved = (
                float((weight - known[0]).double().norm())
                + float(known[0].double().norm()) * 2.0**-23
            )
            bound = (known[1] + moved) * ROUNDING
            if bound <= known[1] * (1 + self._slack):
                return bound
        norm = spectral_norm(weight)
        self._known[place] = (weight.clone(), norm)
        return norm


def squared_gradient_bounds(
    layers: list[Layer],
    inputs: list[Tensor],
    slopes: Tensor,
    norms: list[float],
    trained: Container[int],
) -> Tensor:
    """Upper bounds on the squared norm of each record's gradient: float64, shape (B,). Private.

    Args:
        inputs: squared norms of the input of each linear layer or more, float64, shape (B,).
        slopes: ``|d f / d h_H|`` of each record or more, float64, shape (B,).
        norms: of the weights, from `spectral_norm`; the first one is not used.
        trained: ids of the parameters whose gradients are summed, frozen meanwhile or not.
    """
    total = torch.zeros_like(slopes)
    later = 1.0  # from the output of this layer to the output of the net
    for layer, h, norm in reversed(list(zip(layers, inputs, norms, strict=True))):
        later *= layer.slope
        linear = layer.linear
        squared = torch.zeros_like(slopes)
        if id(linear.weight) in trained:
            squared = squared + h
        if linear.bias is not None and id(linear.bias) in trained:
            squared = squared + 1
        total += squared * later**2
        later *= norm
    return total * slopes.square() * ROUNDING**2


def propagated(layers: list[Layer], first: Tensor, norms: list[float]) -> list[Tensor]:
    """Bounds on the squared norms of the layers' inputs from the first one's, as in the paper.

    ``|phi(W h + b)| <= Lip(phi) (|W| |h| + |b|) + |phi(0)| sqrt(width)``.

    Args:
        first: squared norms of the records, float64, shape (B,).
        norms: of the weights, from `spectral_norm`.
    """
    bound = first.sqrt()
    bounds = []
    for layer, norm in zip(layers, norms, strict=True):
        bounds.append(bound.square())
        bias = (
            0.0 if layer.linear.bias is None else float(layer.linear.bias.detach().double().norm())
        )
        bound = layer.slope * (norm * bound + bias) + layer.at_zero * math.sqrt(
            layer.linear.out_features
        )
    return bounds
