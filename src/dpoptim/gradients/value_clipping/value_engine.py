"""Value clipping: factors known after the forward pass, then one ordinary backward pass."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from dpoptim.clipping import ClippingRule
from dpoptim.errors import PrivacyError, axes_of
from dpoptim.gradients.accumulation.totals import MakeTotals, Totals
from dpoptim.gradients.arithmetic.norms import LONG_BLOCK, row_squared_norms
from dpoptim.gradients.arithmetic.precision import exact_arithmetic
from dpoptim.gradients.arithmetic.products import (
    UNIT_ROUNDOFF,
    Groups,
    add_weighted_outer,
    add_weighted_rows,
)
from dpoptim.gradients.engine import Engine, HandedOver, Reduction
from dpoptim.gradients.per_sample.per_sample_grads import zero_outside
from dpoptim.gradients.placement import Placement
from dpoptim.gradients.value_clipping.feed_forward import (
    SpectralNorms,
    layers_of,
    propagated,
    squared_gradient_bounds,
    stays_in_range,
)
from dpoptim.gradients.value_clipping.value_hooks import EngineHook
from dpoptim.gradients.watch.model_watch import ModelWatch
from dpoptim.runtime.torch_internals import saved_tensors_hooks_are_set

# records with longer activations count as zero: products with them would leave the float32 range
LARGEST = 2.0**40
MOST_MARGIN = 0.25


@dataclass(frozen=True)
class _Forward:
    """One forward pass.

    Attributes:
        output: the model's.
        shown: what the loss is computed from in its place, so that nobody else holds the model's
            graph.
        inputs: of all layers.
        squared: norms of the rows of these, float64, shape (B,).
        edges: where the gradients of the layers' outputs pass; None where nothing before is
            trained.
        dropped: rows that count as zero, if any; bool, shape (B,).
    """

    output: Tensor
    shown: Tensor
    inputs: list[Tensor]
    squared: list[Tensor]
    edges: list[GradientEdge | None]
    dropped: Tensor | None


class ValueEngine(Engine):
    """Sums gradients bounded before they are computed, for the nets of `feed_forward` alone.

    Args:
        model: see `layers_of`.
        clipping, capacity, totals, placement: as for `Engine`.
        paper: whether to use the paper's bound (softmax cross-entropy only) instead of measured
            slopes.

    **Guarantee.** As for `Engine`: sums are those of `products`, with a margin of their own for
    what the propagation through the layers rounds.
    """

    takes_scalars = False

    def __init__(
        self,
        model: nn.Module,
        clipping: ClippingRule,
        *,
        capacity: int,
        paper: bool,
        totals: MakeTotals = Totals,
        placement: Placement | None = None,
    ) -> None:
        self._layers = layers_of(model)
        super().__init__(
            model, clipping, capacity=capacity, reduction="sum", totals=totals, placement=placement
        )
        if self._trained.stored_narrow is not None:
            raise PrivacyError(
                f"parameter {self._trained.stored_narrow!r} is stored in bfloat16 or float16, "
                "whose sums over a batch round too coarsely for the bound of ValueClippedSGD. Fix: "
                "model.float(), or DPSGD."
            )
        self._paper = paper
        self._norms = SpectralNorms([layer.linear.weight for layer in self._layers])
        self._inputs: list[Tensor] = []
        self._squared: list[Tensor] = []  # norms of their rows
        self._edges: list[GradientEdge | None] = []
        self._dropped: Tensor | None = None
        self._forward: _Forward | None = None
        self._handles: list[RemovableHandle] = []
        self._attached: list[tuple[int, torch.dtype]] = []  # parameters, by id

    def attach(self, *, watched: bool = True) -> None:
        self._handles.append(self.model.register_forward_pre_hook(EngineHook(self, "start")))
        for i, layer in enumerate(self._layers):
            self._handles.append(layer.linear.register_forward_pre_hook(EngineHook(self, i)))
            self._handles.append(layer.linear.register_forward_hook(EngineHook(self, i)))
        self._handles.append(self.model.register_forward_hook(EngineHook(self, "end")))
        self._attached = [(id(p), p.dtype) for p in self.model.parameters()]
        self.state = ModelWatch(self.model) if watched else None

    def detach(self) -> None:
        self.state = None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._forget()

    def backward(
        self,
        loss: Tensor,
        reduction: Reduction = "sum",
        handed_over: HandedOver = "vector",
    ) -> None:
        """Add the bounded gradients of a loss per delivered row, (rows,), of the last output.

        Raises:
            PrivacyError: these are other losses.
        """
        forward = self._forward
        if handed_over != "vector" or forward is None or len(loss) != len(forward.output):
            raise PrivacyError(
                "value clipping takes the losses of the delivered rows, of shape (rows,) and "
                "computed from model(x). Fix: "
                'compute the loss with reduction="none", one number for each record.'
            )
        if len(loss) != self.rows_open:
            raise PrivacyError(
                "private.backward was called on rows that private.batches() did not deliver, or a "
                "second time. Fix: one call for each batch."
            )
        self._forget()
        with torch.enable_grad(), exact_arithmetic():
            (slopes,) = torch.autograd.grad(loss.sum(), forward.shown, allow_unused=True)
            if slopes is None:
                raise PrivacyError(
                    "private.backward was given losses of an earlier output: model(x) ran again "
                    "since. Fix: compute the losses from the model's last output; for a look at "
                    "the model, use torch.no_grad()."
                )
            self._add(slopes, loss.detach(), forward, self.sum_margin())
        self.handed_over.add((handed_over, reduction))

    def sum_margin(self) -> float:
        """Share of the clip norm left to rounding.

        Of sums over the batch, as for every engine, and of the propagation through layers of width
        d, which adds relative errors of d u sqrt(d) at most for each.
        """
        u = UNIT_ROUNDOFF[min((p.dtype for p in self.parameters), key=lambda d: d.itemsize)]
        widths = [
            min(layer.linear.weight.shape) ** 0.5 * max(layer.linear.weight.shape)
            for layer in self._layers
        ]
        share = max(self.margin(), 2.0**-20) + 2 * u * sum(widths)
        if share > MOST_MARGIN:
            raise PrivacyError(
                "layers as wide as these round too coarsely in float32 for a proven bound. Fix: "
                "model.double(), or dpoptim.DPSGD."
            )
        return share

    def _add(self, slopes: Tensor, losses: Tensor, forward: "_Forward", margin: float) -> None:
        self.rows_open = 0
        self._refuse_changed_model()
        self._refuse_overwritten(forward)
        # Of the weights that autograd is about to use.
        later = [self._norms[i] for i in range(1, len(self._layers))]
        # only the paper's bound needs the first one's norm
        norms = [self._norms[0] if self._paper else 1.0, *later]
        if self.null or not stays_in_range(self._layers, norms):
            return
        squared = self._squared_bounds(slopes, losses, forward, norms)
        # zero where nobody is
        share = self.rows.shares(len(squared), self.present, squared.device)
        if self.observer is not None:
            self.observer(squared * share.square(), None, {})
        factors = self.clipping.factors(squared, margin) * share
        weighted = torch.where(
            (factors > 0)[:, None], slopes.flatten(1) * factors.to(slopes.dtype)[:, None], 0.0
        )
        reached = [place for place, edge in enumerate(forward.edges) if edge is not None]
        gradients = torch.autograd.grad(
            forward.output,
            [edge for edge in forward.edges if edge is not None],
            weighted.view_as(forward.output),
            allow_unused=True,
        )
        counted, groups = (factors > 0).double()[None], self._groups_of(len(squared))
        for place, gradient in zip(reached, gradients, strict=True):
            if gradient is not None:
                linear = self._layers[place].linear
                self._add_layer(linear, gradient, forward.inputs[place], counted, groups)

    def _refuse_overwritten(self, forward: "_Forward") -> None:
        read_again = map(self._row_norms, forward.inputs)
        if not all(map(torch.equal, read_again, forward.squared)):
            raise PrivacyError(
                "the batch was overwritten between the model's forward and backward pass: its "
                "bound was for what it held before. Fix: leave a batch as it is until "
                "private.backward(losses) is over; a collate_fn must not reuse its memory."
            )

    def _squared_bounds(
        self, slopes: Tensor, losses: Tensor, forward: "_Forward", norms: list[float]
    ) -> Tensor:
        """Bounds on the rows' squared gradient norms: float64, (rows,); infinite: count as zero."""
        measured = row_squared_norms(slopes, block=LONG_BLOCK).sqrt()
        inputs = forward.squared
        if self._paper:
            promised = 2 * (2 * losses.double()).clamp(0, 1).sqrt()
            measured = torch.maximum(measured, promised)  # f rounds to 0 where its slope does not
            upto = propagated(self._layers, inputs[0], norms)
            inputs = [torch.maximum(*both) for both in zip(upto, inputs, strict=True)]
        squared = squared_gradient_bounds(self._layers, inputs, measured, norms, self.places)
        # times 0, they would not be finite further back
        squared = torch.where(measured > LARGEST, torch.inf, squared)
        if forward.dropped is not None:
            squared = torch.where(forward.dropped, torch.inf, squared)
        return squared

    def _add_layer(
        self, linear: nn.Linear, gradient: Tensor, h: Tensor, counted: Tensor, groups: Groups
    ) -> None:
        """Add a layer's part to its sums, from its input and output gradient (B, outputs)."""
        gradient, h = gradient.contiguous(), h.detach().contiguous()
        if (place := self.places.get(id(linear.weight))) is not None:
            add_weighted_outer(self.totals.sums[place], gradient, h, counted, groups)
        if (place := self.places.get(id(linear.bias))) is not None:
            add_weighted_rows(self.totals.sums[place], gradient, counted, groups)

    def see_start(self) -> None:
        """The model is called. Hooks that take themselves off while it runs are still there."""
        self._forget()
        self._refuse_changed_model()
        if saved_tensors_hooks_are_set():
            raise PrivacyError(
                "the model ran under torch.utils.checkpoint or "
                "torch.autograd.graph.saved_tensors_hooks: its backward pass would use other "
                "numbers than were measured. Fix: run it without."
            )

    def see_input(self, place: int, h: Tensor) -> Tensor:
        """Input of the linear layer at ``place``; its rows' norms are kept."""
        if h.dim() != 2:
            raise PrivacyError(
                f"a linear layer got an input of {axes_of(h)}; the bound is proved for (rows, "
                "features). Fix: dpoptim.DPSGD."
            )
        if torch.is_autocast_enabled(h.device.type):
            raise PrivacyError(
                "the model ran under torch.autocast, whose sums over a batch round too coarsely "
                "for the bound. Fix: train in float32, or dpoptim.DPSGD."
            )
        if place == 0 and h.requires_grad:
            raise PrivacyError(
                "the model's input requires a gradient: what it was computed from, such as the "
                "model itself, would be used more often than the bound allows. Fix: "
                "model(x.detach()); for models of models, dpoptim.DPSGD."
            )
        # A record that would reach infinity would turn everybody's gradient into NaN: it counts as
        # zero instead.
        squared = self._row_norms(h)
        small = squared <= LARGEST**2
        if not bool(small.all()):
            h = zero_outside(h, small)
            squared = squared.where(small, 0.0)
            self._dropped = ~small if self._dropped is None else self._dropped | ~small
        self._inputs.append(h)
        self._squared.append(squared)
        return h

    def see_output_of(self, output: Tensor) -> None:
        """Keep the graph's place of a linear layer's output, whatever is done in place later."""
        self._edges.append(get_gradient_edge(output) if output.requires_grad else None)

    def _row_norms(self, h: Tensor) -> Tensor:
        return row_squared_norms(h.detach(), block=LONG_BLOCK)

    def see_output(self, output: Tensor) -> Tensor:
        """Keep the model's output, and hand on a copy without its graph."""
        if not len(self._inputs) == len(self._edges) == len(self._layers):
            raise PrivacyError(
                "the model's layers did not run once each. Fix: call the model as a whole, once "
                "for each batch."
            )
        # autograd may have kept the output's memory
        shown = output.detach().clone().requires_grad_()
        self._forward = _Forward(
            output, shown, self._inputs, self._squared, self._edges, self._dropped
        )
        return shown.clone()  # in-place operations and hooks on it are the loss's

    def _refuse_changed_model(self) -> None:
        ours = {*self.placement.hooks, *(handle.id for handle in self._handles)}
        same = layers_of(self.model, ours) == self._layers
        if not same or [(id(p), p.dtype) for p in self.model.parameters()] != self._attached:
            raise PrivacyError(
                "the model's layers, their options or parameters were changed after attaching; the "
                "bound is of those that were attached. Fix: change them before dpoptim.attach, or "
                "attach again."
            )

    def _forget(self) -> None:
        self._inputs, self._squared, self._edges = [], [], []
        self._dropped = self._forward = None
