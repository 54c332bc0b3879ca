"""A loss as solvers need it: sums of clipped combinations of gradients at any points."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpoptim.arguments import number_from_zero, whole_number
from dpoptim.clipping import Clipping
from dpoptim.gradients.engine import Engine
from dpoptim.solvers import linear_sums
from dpoptim.solvers.linear_model import LinearModel, as_rows, as_tensor, bound_and_power

KNOWN = ("squared_row_norms", "shares", "weights")  # in a batch, after x and y
Terms = Sequence[tuple[float, Tensor]]  # pairs (c_j, w_j)


class Problem(Protocol):
    """A loss f(w; z) of parameters w, one float64 vector, and a record z; and a public penalty."""

    @property
    def dimension(self) -> int:
        """d, the number of parameters."""
        ...

    @property
    def capacity(self) -> int:
        """The most records that one logical sum may hold for the bound to be proven."""
        ...

    def initial(self) -> Tensor:
        """A public starting point: float64, shape (d,), on the CPU."""
        ...

    def prepare(self, records: tuple[Any, ...]) -> Any:
        """Turn a chunk of the data, a slice of each array, into the other methods' ``batch``."""
        ...

    def clipped_sum(self, batch: Any, terms: Terms, bound: float) -> Tensor:
        """``sum of clip(sum_j c_j grad f(w_j; z), bound)`` over a batch: float64, (d,). Private.

        **Guarantee.** One record changes the sum by at most ``bound`` (by twice that if it takes
        another value), rounding included; a record whose gradient is not finite counts as zero.
        """
        ...

    def total_loss(self, batch: Any, w: Tensor) -> float:
        """``sum over the batch's records of f(w; z)``. Private: for public data only."""
        ...

    def penalty(self, w: Tensor) -> float:
        """The public part of the objective, such as ``l2 |w|^2 / 2``."""
        ...

    def penalty_gradient(self, w: Tensor) -> Tensor:
        """Its gradient: float64, shape (d,)."""
        ...


class LinearProblem:
    """A generalised linear model in closed form. Batches are (x, y), from `prepare` or by hand.

    The data is (x, y), or (x, y, shares), where `bounded_shares` says how much of each row's
    clipped gradient is added, or (x, y, shares, weights), whose weights multiply each row's
    gradient before it is clipped. A record may have K rows: x of shape (n, K, features), the rest
    of shape (n, K).

    Args:
        model: loss and shape.
        capacity: the most rows in one logical sum: n for full-batch solvers, the batch size for
            single-pass ones.
        l2: strength of the public penalty ``l2 |V|^2 / 2`` on all parameters but the intercepts;
            >= 0.

    Examples:
        >>> from dpoptim.solvers import LinearModel, LinearProblem
        >>> problem = LinearProblem(LinearModel("logistic", features=4), capacity=1_000, l2=0.01)
    """

    def __init__(self, model: LinearModel, *, capacity: int, l2: float = 0.0) -> None:
        self.model = model
        self.capacity, self.l2 = checked_settings(capacity, l2)

    @property
    def dimension(self) -> int:
        return self.model.dimension

    def initial(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=torch.float64, device="cpu")

    def prepare(self, records: tuple[Any, ...]) -> tuple[Tensor, ...]:
        x, y = as_rows(records[0]), as_tensor(records[1])
        if x.dim() == 3:  # float64: a record's rows lie in several groups, see `clipped_sum`
            x, y = x.flatten(0, 1).double(), y.flatten(0, 1)
        norms = self.model.squared_row_norms(x)
        if linear_sums.serve(x, self.model.outputs, self.model.columns):
            y = y.double()  # once, and not in each pass
        return (x, y, norms, *(part.to(x.device) for part in factors_of(records)))

    def clipped_sum(self, batch: tuple[Tensor, ...], terms: Terms, bound: float) -> Tensor:
        x, y, *known = batch
        known_of = dict(zip(KNOWN, known, strict=False))
        return self.model.clipped_sum(x, y, terms, bound, capacity=self.capacity, **known_of).cpu()

    def total_loss(self, batch: tuple[Tensor, ...], w: Tensor) -> float:
        losses = self.model.losses(self.model.scores(w, batch[0]), batch[1])
        for factors in batch[3:]:
            losses = losses * factors
        return float(losses.sum())

    def penalty(self, w: Tensor) -> float:
        return 0.5 * float(w @ self.penalty_gradient(w))

    def penalty_gradient(self, w: Tensor) -> Tensor:
        gradient = self.l2 * w
        if self.model.intercept:
            gradient.view(self.model.outputs, -1)[:, -1] = 0
        return gradient


class ModuleProblem:
    """A module without cross-record dependence, and a loss a record; batches are (input, target).

    Gradients at several points come from copies of the model that share one layer use, so a
    difference of gradients is clipped as exactly as a tied weight. The copies run in ``eval()``
    mode: dropout would differ between them.

    Args:
        model: the module; it is copied and left as it is. Its parameters are the starting point.
        loss: maps (output, target) to one number for each record, shape (B,). It must raise for no
            record.
        capacity: the most records in one logical sum.
        l2: strength of the public penalty ``l2 |w|^2 / 2``; >= 0.

    Raises:
        PrivacyError: a layer that cannot be clipped record by record, or one that keeps statistics
            in buffers.

    Examples:
        >>> import torch
        >>> from dpoptim.solvers import ModuleProblem
        >>> def loss(output, target):
        ...     return (output - target).square().sum(1)
        >>> problem = ModuleProblem(torch.nn.Linear(3, 1), loss, capacity=1_000)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        capacity: int,
        l2: float = 0.0,
    ) -> None:
        self.loss = loss
        self.capacity, self.l2 = checked_settings(capacity, l2)
        self._model = copy.deepcopy(model).eval()
        self._copies: dict[int, tuple[Copies, Engine]] = {}
        self._attached(1)  # refuses what cannot be clipped, here and not later

    @property
    def dimension(self) -> int:
        return self.initial().numel()

    def initial(self) -> Tensor:
        return torch.cat(
            [
                p.detach().double().flatten().cpu()
                for p in self._model.parameters()
                if p.requires_grad
            ]
        )

    def prepare(self, records: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        x, y = (as_tensor(part) for part in records)
        return x, y

    def clipped_sum(self, batch: tuple[Tensor, Tensor], terms: Terms, bound: float) -> Tensor:
        x, y = batch
        copies, engine = self._attached(len(terms))
        bound, scale = bound_and_power(bound)
        engine.clipping = Clipping(bound)
        for model, (_, w) in zip(copies.models, terms, strict=True):
            write_parameters(model, w)
        engine.begin_microbatch(len(x))
        with torch.enable_grad():
            losses = [self.loss(output, y) for output in copies(x)]
            combined = [
                (c * scale) * loss.sum() for (c, _), loss in zip(terms, losses, strict=True)
            ]
            torch.autograd.backward(torch.stack(combined).sum())
        engine.refuse_changes()
        return torch.cat([part.flatten().cpu() for part in engine.split(engine.take())]) / scale

    def total_loss(self, batch: tuple[Tensor, Tensor], w: Tensor) -> float:
        write_parameters(self._model, w)
        with torch.no_grad():
            return float(self.loss(self._model(batch[0]), batch[1]).double().sum())

    def penalty(self, w: Tensor) -> float:
        return 0.5 * self.l2 * float(w @ w)

    def penalty_gradient(self, w: Tensor) -> Tensor:
        return self.l2 * w

    def _attached(self, points: int) -> tuple["Copies", Engine]:
        """As many copies of the model as there are points, on one recorder."""
        if points not in self._copies:
            copies = Copies([copy.deepcopy(self._model) for _ in range(points)])
            engine = Engine(
                copies, Clipping(1.0), capacity=self.capacity, reduction="sum", tied=copies.same()
            )
            engine.attach()
            self._copies[points] = copies, engine
        return self._copies[points]


class Copies(nn.Module):
    """Copies of one model, run on the same input."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [model(x) for model in self.models]

    def same(self) -> dict[nn.Parameter, nn.Parameter]:
        """Each parameter of the second and later copies, by the first copy's."""
        first, *others = self.models
        return {
            p: q
            for other in others
            for p, q in zip(other.parameters(), first.parameters(), strict=True)
        }


def checked_settings(capacity: int, l2: float) -> tuple[int, float]:
    """Both if they are in range, else a ValueError."""
    return whole_number("capacity", capacity, least=1), number_from_zero("l2", l2)


def factors_of(records: tuple[Any, ...]) -> list[Tensor]:
    """Shares and weights of a chunk's rows, float64, shape (rows,), as far as it has them."""
    shares, weights = records[2:3], records[3:4]
    weighted = [as_tensor(part).double().flatten() for part in weights]
    return [bounded_shares(part) for part in shares] + weighted


def bounded_shares(shares: Any) -> Tensor:
    """How much each row adds, float64, shape (rows,): a record's rows at most 1, whatever is given.

    Args:
        shares: shape (n,), one row a record, or (n, K).
    """
    found = as_tensor(shares).double().nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
    together = found.view(len(found), -1).sum(1, keepdim=True).clamp(min=1)
    return (found.view(len(found), -1) / together).flatten()


def write_parameters(model: nn.Module, w: Tensor) -> None:
    """Write the vector ``w``, (d,), into the model's trainable parameters, in order."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p, part in zip(trainable, w.split([p.numel() for p in trainable]), strict=True):
            p.copy_(part.view_as(p))
