"""The engine: per-record clipped gradient sums of any model, from one ordinary backward pass.

Everything in here is left of the gate: private. The sums live in buffers of the engine; ``.grad`` stays None.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.books import BookedLayer, Books, Pass
from dpoptim.gradients.contributions import Contribution, Norms, merge
from dpoptim.gradients.layers import rule_for
from dpoptim.gradients.layers.fallback import FallbackLayer
from dpoptim.gradients.products import UNIT_ROUNDOFF, chunk_rows, margin

Reduction = Literal["mean", "sum"]

# Relative error of a squared norm: a float64 sum of up to 2^29 non-negative terms for each record.
NORM_INFLATION = 2.0**-24


class Engine:
    """Books a model while attached and sums its clipped per-record gradients.

    Args:
        model: any module; it keeps its class and its state-dict keys.
        clipping: the bound on each record.
        capacity: records that a logical batch may be expected to hold at most; public. A larger batch stays exact in
            float64 arithmetic.
        reduction: how the user's loss combines the rows of one backward pass.

    Raises:
        PrivacyError: a layer or option that cannot be clipped record by record, by name.

    **Guarantee.** For any two sets of books that differ in the rows of one record, the sums that `take` returns differ
    by at most ``clipping.norm`` in Euclidean norm, rounding included (theorem in `products`).
    """

    def __init__(self, model: nn.Module, clipping: Clipping, *, capacity: int, reduction: Reduction = "mean") -> None:
        self.model, self.clipping, self.capacity, self.reduction = model, clipping, capacity, reduction
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("model has no parameter that requires a gradient; there is nothing to train.")
        for name, p in named:
            if p.dtype not in UNIT_ROUNDOFF:
                raise PrivacyError(
                    f"parameter {name!r} is {p.dtype}; the books hold float32 and float64. Fix: model.float()."
                )
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.places = {id(p): i for i, p in enumerate(self.parameters)}
        by_device: dict[torch.device, list[int]] = {}
        for p in self.parameters:
            by_device.setdefault(p.device, []).append(p.numel())
        self._layout = list(by_device.items())
        self._buffers: list[Tensor] = []
        self._rows_open = 0  # rows delivered and not yet closed
        self._rows_summed = 0  # rows of the logical batch so far
        self._null = False
        self._model_rows: int | None = None
        self._undo: list[Callable[[], None]] = []
        self.books = Books(self._close)

    # ---- attaching -------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the model's layers on the books; `detach` takes every trace away."""
        try:
            self._book(self.model, "")
            for name, p in zip(self.names, self.parameters, strict=True):
                self._undo.append(p.register_hook(partial(self._reached, name, p)).remove)
            self._undo.append(self.model.register_forward_pre_hook(self._see_input, with_kwargs=True).remove)
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _book(self, module: nn.Module, name: str) -> None:
        trainable = [key for key, p in module.named_parameters() if p.requires_grad]
        if not trainable:
            return
        label = name or type(module).__name__
        if "forward" in vars(module):
            raise PrivacyError(
                f"module {label!r} already has a forward pass of its own on the instance: it is attached elsewhere, or "
                "another library wrapped it. Fix: leave the other `with dpoptim.attach(...)` first, or unwrap it."
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise PrivacyError(
                f"layer {label!r} ({type(module).__name__}) normalises each record by the others in its batch, so no "
                "clipping can bound one record. Fix: use nn.GroupNorm or nn.LayerNorm instead."
            )
        original = module.forward
        rule = rule_for(module)
        if rule is not None:
            rule.check(module, label)
            keys = [key for key, p in module._parameters.items() if p is not None]

            def booked(*args: Any, **kwargs: Any) -> Any:
                if not torch.is_grad_enabled():
                    return original(*args, **kwargs)
                (x,) = (*args, *kwargs.values())
                x = rule.prepare(module, label, x, self._model_rows)
                return BookedLayer.apply(self.books, rule, module, label, x, *(module._parameters[k] for k in keys))

            self._replace_forward(module, booked)
        elif any(p is not None and p.requires_grad for p in module._parameters.values()):
            self._refuse_coupled(module, label)
            fallback = FallbackLayer(self.books, module, label, trainable)

            def whole(*args: Any, **kwargs: Any) -> Any:
                if not torch.is_grad_enabled():
                    return original(*args, **kwargs)
                return fallback(self._model_rows, args, kwargs)

            self._replace_forward(module, whole)
        else:
            for key, child in module.named_children():
                self._book(child, f"{name}.{key}" if name else key)

    def _refuse_coupled(self, module: nn.Module, label: str) -> None:
        for key, child in module.named_modules():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                raise PrivacyError(
                    f"layer {label + '.' + key!r} ({type(child).__name__}) normalises each record by the others in its "
                    "batch. Fix: use nn.GroupNorm or nn.LayerNorm instead."
                )

    def _replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        module.forward = forward
        self._undo.append(lambda: vars(module).pop("forward", None))

    def _see_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim())
        first = next(tensors, None)
        self._model_rows = None if first is None else first.shape[0]

    def _reached(self, name: str, parameter: nn.Parameter, g: Tensor | None) -> None:
        """Parameter hook: the books hand autograd None, so a tensor has come by another way."""
        if g is not None:
            raise PrivacyError(
                f"parameter {name!r} was used outside its module's forward pass (such as F.linear(x, layer.weight), "
                "or a penalty on the weights): that part of its gradient would escape clipping. Fix: call the module "
                "itself; apply weight decay in the optimizer."
            )
        self.books.reached(parameter)

    # ---- one logical batch -----------------------------------------------------------------------------------

    def deliver(self, rows: int, *, null: bool = False) -> None:
        """Announce the next physical batch; ``null``: a placeholder whose gradient counts as zero."""
        self._rows_open, self._null = rows, null

    def _close(self, finished: Pass) -> None:
        uses, rows = self._uses(finished)
        if not uses:
            return
        if rows > self._rows_open:
            raise PrivacyError(
                f"backward passes covered more rows than were delivered (this one {rows}, left {self._rows_open}): a "
                "record would count twice. Fix: one backward pass per row; add losses before calling backward()."
            )
        self._rows_open -= rows
        if self._null:
            return
        with torch.no_grad(), exact_products():
            merged = {i: merge(parts, rows, self.parameters[i].numel()) for i, parts in uses.items()}
            self._add_clipped(merged, rows)
        self._rows_summed += rows

    def _uses(self, finished: Pass) -> tuple[dict[int, list[Contribution]], int]:
        """The pass's contributions by parameter, and its number of records, which all layers must agree on."""
        uses: dict[int, list[Contribution]] = {}
        first = None
        for entry in finished.entries:
            held = {
                key: p for key, p in entry.module.named_parameters() if id(p) in finished.reached
            }  # harmless passes, such as autograd.grad(loss, x), reach no parameter
            if not held:
                continue
            first = first or entry
            if entry.records != first.records:
                raise PrivacyError(
                    f"layer {entry.layer!r} saw {entry.records} rows on its first axis where layer {first.layer!r} saw "
                    f"{first.records}: the first axis must be the batch in every layer. Fix: keep (batch, ...) shapes; "
                    "do not flatten records and positions together, and give positions the shape (1, T)."
                )
            contributions = entry.contributions()
            for key, p in held.items():
                uses.setdefault(self.places[id(p)], []).append(contributions[key])
        return uses, 0 if first is None else first.records

    def _add_clipped(self, merged: dict[int, Contribution], rows: int) -> None:
        """Add the clipped sum of one pass to the engine's buffers."""
        self._buffers = self._buffers or self._zeros()
        sums = self.split(self._buffers)
        scale = float(rows) if self.reduction == "mean" else 1.0  # from the mean's gradients to the records' own
        device = self.parameters[0].device
        squared = torch.zeros(rows, dtype=torch.float64, device=device)
        mass = torch.zeros(rows, dtype=torch.float64, device=device)
        for contribution in merged.values():
            norms = contribution.norms()
            squared += norms.squared.to(device)
            mass += norms.mass_squared.to(device)
        dtype = min((p.dtype for p in self.parameters), key=lambda d: d.itemsize)
        factors = self.clipping.factors(
            Norms(squared * scale**2, mass * scale**2),
            margin=margin(dtype, self.capacity),
            inflation=NORM_INFLATION,
        )
        countable = factors > 0
        if not bool(countable.all()):
            merged = {i: contribution.without(countable) for i, contribution in merged.items()}
        beyond = self._rows_summed + rows > self.capacity
        for i, contribution in merged.items():
            p = self.parameters[i]

            def rounding(cancellation: float, dtype: torch.dtype = p.dtype) -> int:
                if beyond and dtype != torch.float64:
                    return 0
                return chunk_rows(dtype, self.capacity, cancellation)

            contribution.add_weighted_sum(sums[i].view(-1), (factors * scale).to(p.device), rounding)

    def take(self) -> list[Tensor]:
        """The clipped sums of the logical batch, and a fresh start: one flat float64 vector for each device.

        Zeros where no row was closed: an empty batch, or parameters that no loss reached. See `split`.
        """
        buffers = self._buffers or self._zeros()
        self._buffers, self._rows_summed, self._rows_open = [], 0, 0
        return buffers

    def split(self, buffers: list[Tensor]) -> list[Tensor]:
        """Views of what `take` returned, one in the shape of each parameter."""
        places = {device: buffer.split(sizes) for (device, sizes), buffer in zip(self._layout, buffers, strict=True)}
        views = {device: iter(pieces) for device, pieces in places.items()}
        return [next(views[p.device]).view(p.shape) for p in self.parameters]

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros(sum(sizes), dtype=torch.float64, device=device) for device, sizes in self._layout]


@contextmanager
def exact_products() -> Iterator[None]:
    """Keep the books' matrix products in the precision that the theorem in `products` assumes (no TF32, no bf16)."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
