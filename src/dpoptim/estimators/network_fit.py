"""A network's private fit: bounded rows in, a network and a guarantee out."""

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal, get_args

import dp_accounting
import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from dpoptim.accounting.accountant import check_epsilon, compute_epsilon
from dpoptim.accounting.calibration import calibrate_event
from dpoptim.accounting.gaussian import gdp_mu
from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.public_numbers import public_number_of_records, stated_delta
from dpoptim.arguments import bound, one_of, real_number, whole_number
from dpoptim.data.sparse_rows import rows_at_once
from dpoptim.estimators.chunks import Chunks, over_chunks, refuse_change
from dpoptim.estimators.fitting import Given
from dpoptim.estimators.persons import owners_of, units_in
from dpoptim.estimators.repeats import FROM_EARLIER, Fit, label_of
from dpoptim.estimators.settings import Delta, PrivateSettings
from dpoptim.estimators.table import ClippedRows, clipped_to, data_set_of, public_norm, table
from dpoptim.estimators.weights import notes_of_weights, weights_of_rows
from dpoptim.iterate import Iterate
from dpoptim.methods import DiceSGD, TrainingMethod
from dpoptim.optimizers import OptimizerSettings, optimizer
from dpoptim.plan import Plan
from dpoptim.planning.choice import effective_noise, taken_back
from dpoptim.planning.ranking import adaptive_learning_rate, learning_rate, noise_to_signal
from dpoptim.recipes import recipe
from dpoptim.registry import entry
from dpoptim.training.attach import attach_own
from dpoptim.training.batches.privacy_units import Persons
from dpoptim.training.planned_rate import PlannedRate
from dpoptim.training.tail_average import TailAverage

WIDEST = 2**31 - 1  # layer
Activation = Literal["tanh", "relu", "gelu"]
Run = Callable[[Tensor, Ledger | None], Guarantee]


ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}


# The clip norm where noise is as long as it, and its limits; the first is from
# benchmarks/choose_defaults.py.
CLIP = 1.2
LEAST_CLIP, MOST_CLIP = 1.0, 6.0
# Of DiceSGD, which feeds back what is clipped off and pays noise for each unit of it; from there.
FEEDBACK_CLIP = 1.2
ROWS_AT_A_TIME = 4096  # in training and in prediction, at most


@dataclass(kw_only=True, eq=False, repr=False)
class NetworkFit(PrivateSettings):
    """Base of the estimators of networks, whose settings are their arguments."""

    epsilon: float = field(default=1.0, kw_only=False)
    delta: Delta = field(default="auto", kw_only=False)
    hidden_layer_sizes: Sequence[int] | int = (64,)
    activation: Activation = "tanh"
    data_norm: float | None = None
    batch_size: int | None = None
    epochs: float = 40
    optimizer: str = "sgd"
    learning_rate: float | None = None
    momentum: float | None = None
    betas: tuple[float, float] | None = None
    # a number; policies are refused, with the setting to take. None: see `clip_by_noise`
    clip_norm: Any = None
    iterate: Iterate = "average"
    projection: float | None = None
    method: str = "dp-sgd"
    method_options: Mapping[str, Any] | None = None
    n: int | None = None
    warm_start: bool = False
    random_state: Any = None
    rows_per_person: int = 16
    # the default learning rate over that of `dpoptim plan`, or that of adaptive optimizers; chosen
    # by benchmarks/choose_defaults.py, alike for all
    _rate = 1.0

    @torch.random.fork_rng(devices=[])  # the caller's generator stays as it is
    def _train(
        self,
        x: Any,
        targets: Tensor,
        outputs: int,
        loss: Callable[[Tensor, Tensor], Tensor],
        notes: tuple[str, ...],
        given: Given,
    ) -> None:
        """Set ``network_`` and ``privacy_``.

        ``loss`` gives one number a row. A chunk goes on from the chunks before it.
        """
        earlier: Chunks | None = getattr(self, "_chunks", None) if given.chunk else None
        owners = owners_of(x, given.persons, self.rows_per_person)
        if earlier is not None:
            refuse_change(self.privacy_, self.relation, by_person=owners is not None)
        features, (unit, units) = x.shape[1], units_in(x, owners)
        weights = weights_of_rows(given.weights, rows=len(x))
        n = public_number_of_records(self.n, units, self.relation)
        delta, said = stated_delta(self.delta, n, epsilon=self.epsilon)
        norm = public_norm(self.data_norm, features)
        epsilon = real_number("epsilon", self.epsilon)
        one_of("activation", self.activation, get_args(Activation))
        last = self._last(features, outputs) if self.warm_start or earlier is not None else None
        network = self._new(features, outputs) if last is None else last
        parameters = sum(p.numel() for p in network.parameters())
        anew = last is None
        plan = self._plan_of_fit(n, delta, epsilon, parameters, anew=anew)
        plan = replace(plan, unit=unit)
        said = (*said, *notes_of_weights(weights))
        if earlier is None and last is not None:
            said = (*said, FROM_EARLIER)
        if self.data_norm is None:
            said = (*said, clipped_to(features))
        by = optimizer(self.optimizer, momentum=self.momentum, betas=self.betas)
        start, chosen_for = self._learning_rate(plan, parameters, by), self._chosen_for(plan, by)
        one_of("iterate", self.iterate, get_args(Iterate))
        at_once = rows_at_once(features, ROWS_AT_A_TIME)

        def run(targets: Tensor, ledger: Ledger | None) -> Guarantee:
            """Train the network, and say what that cost."""
            stepper = by.make(network.parameters(), start)
            rate = PlannedRate(stepper, start, plan, chosen_for)
            average = TailAverage(network, self._averaged_from(plan.steps))
            with attach_own(
                plan,
                network,
                stepper,
                data_set_of(x, targets, weights, norm=norm),
                ledger=ledger,
                label=label_of(self._named, epsilon, delta),
                noise_seed=self.noise_seed,
                persons=given.persons,
                rows_per_record=plan.unit.most_rows,
                projection=self.projection,
                random_iterate=self.iterate == "random",
            ) as private:
                for batch, wanted, *factors in private.batches(physical_batch_size=at_once):
                    losses = loss(network(batch), wanted)
                    private.backward(losses * factors[0] if factors else losses)
                    rate.before(private.steps_done, private.clip_norm)
                    stepper.step()
                    if private.finished_step:
                        average.update(private.steps_done)
                swaps = {"random": private.swap_random_iterate}
                swaps.get(self.iterate, average.swap)()
                return private.spent()

        event, guarantee = self._trained(run, plan, targets, owners, anew=anew)
        self.network_: nn.Sequential = network.eval()
        self.optimizer_, self.learning_rate_ = str(by), start
        guarantee = replace(guarantee, notes=(*guarantee.notes, *notes, *said))
        if earlier is None:
            self._chunks = Chunks(np.zeros(0), n)  # the network itself is what goes on
        else:
            guarantee = over_chunks(self.privacy_, guarantee)
        self.privacy_ = self._counted(Fit(event, guarantee, n, whole=earlier is None))

    def _trained(
        self, run: Run, plan: Plan, targets: Tensor, owners: Persons | None, *, anew: bool
    ) -> tuple[dp_accounting.DpEvent, Guarantee]:
        """Train, and whatever has to be found out before; the event of it all, and its guarantee.

        Args:
            run: trains on targets, charged to a ledger.
            anew: whether the network starts from public weights.
        """
        return plan.event, run(targets, self.ledger)

    def _event(self, plan: Plan) -> dp_accounting.DpEvent:
        """Everything that the next fit by this plan releases."""
        return plan.event

    def _plan_of_fit(
        self, n: int, delta: float, epsilon: float, parameters: int, *, anew: bool
    ) -> Plan:
        """The plan of a fit all of whose releases cost ``epsilon``."""
        return self._plan(n, delta, epsilon=epsilon, parameters=parameters)

    def _default_clip(self, n: int, parameters: int, mu: float) -> float:
        """The clip norm that nobody has set, from public numbers; see `clip_by_noise`."""
        return FEEDBACK_CLIP if self.method == DiceSGD.name else clip_by_noise(n, parameters, mu)

    def _plan(
        self,
        n: int,
        delta: float,
        *,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        parameters: int = 1,
    ) -> Plan:
        """The plan of a fit on ``n`` records, by its ``epsilon`` or its ``noise_multiplier``.

        By the number of ``parameters`` goes a clip norm that nobody has set, and no price.
        """
        chosen = entry(self.method)
        if chosen.solver:
            raise ValueError(
                f"method={self.method!r} is a solver of linear models. Fix: "
                f"DPLogisticRegression(solver={self.method!r}), or DPLinearRegression."
            )
        settings = chosen.checked("method_options", self.method_options or {})
        if hasattr(self.clip_norm, "start"):  # of a policy
            raise ValueError(
                "clip_norm must be a number, by which the learning rate goes; one that changes is "
                f"the method's. Fix: method_options={{'clip_norm': {self.clip_norm!r}}}."
            )
        clip_norm = 1.0
        if self.clip_norm is not None:
            clip_norm = real_number("clip_norm", self.clip_norm)
        elif epsilon is not None:
            mu = gdp_mu(check_epsilon(epsilon), delta)
            clip_norm = self._default_clip(n, parameters, mu)
        made: TrainingMethod = chosen.make(**{"clip_norm": clip_norm} | settings)
        return made.plan(
            n=n,
            batch_size=made.batch_within(recipe("mlp", n).batch_size, n)
            if self.batch_size is None
            else self.batch_size,
            epochs=real_number("epochs", self.epochs),
            delta=delta,
            neighboring=self.relation,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
        )

    def _averaged_from(self, steps: int) -> int:
        return steps // 2 if self.iterate == "average" else steps

    def _learning_rate(self, plan: Plan, parameters: int, by: OptimizerSettings) -> float:
        """As told, or by the heuristic of `dpoptim plan` from public numbers."""
        clip_norm = self._chosen_for(plan, by)
        if self.learning_rate is not None:
            return bound("learning_rate", self.learning_rate)
        if clip_norm is None:
            lasting = taken_back(plan)
            return self._rate * adaptive_learning_rate(parameters, plan.steps, lasting)
        noise = noise_to_signal(effective_noise(plan), parameters, plan.batch_size)
        rate = learning_rate(noise, plan.batch_size, plan.steps, by.momentum)
        return self._rate * rate / clip_norm

    def _chosen_for(self, plan: Plan, by: OptimizerSettings) -> float | None:
        """The clip norm that a chosen learning rate is for; None: it is told, or goes by none."""
        if self.learning_rate is not None or by.kind.adaptive:
            return None
        clip_norm = getattr(plan.method, "clip_norm", 1.0)
        if not isinstance(clip_norm, Real):  # a policy
            clip_norm = 1.0 if self.clip_norm is None else self.clip_norm
        return float(clip_norm)

    def epsilon_after(
        self, events: Sequence[dp_accounting.DpEvent], *, n: int, epsilon: float, delta: float
    ) -> float:
        """The epsilon of a fit that costs ``epsilon`` together with fixed ``events``; public.

        A pipeline that shares out one budget asks for it: composing the events costs less than
        adding up epsilons.
        """

        def whole(noise_multiplier: float) -> dp_accounting.DpEvent:
            fit = self._event(self._plan(n, delta, noise_multiplier=noise_multiplier))
            return dp_accounting.ComposedDpEvent([*events, fit])

        if self._plan(n, delta, epsilon=epsilon).guarantee.status != "proven":
            raise ValueError(
                f"method={self.method!r} with method_options={self.method_options!r} has no proven "
                "guarantee, so its cost does not compose with others. Fix: settings with a proof."
            )
        noise = calibrate_event(whole, epsilon=epsilon, delta=delta, neighboring=self.relation)
        fit = self._event(self._plan(n, delta, noise_multiplier=noise))
        return compute_epsilon(fit, delta, self.relation).epsilon

    def _widths(self, features: int, outputs: int) -> list[int]:
        sizes: Any = self.hidden_layer_sizes
        hidden = (
            whole_number("hidden_layer_sizes", width, least=1, most=WIDEST)
            for width in ([sizes] if isinstance(sizes, Real) else sizes)
        )
        return [features, *hidden, outputs]

    def _last(self, features: int, outputs: int) -> nn.Sequential | None:
        """A copy of the last network, to go on from, if it has the right shape.

        A fit that is interrupted leaves ``network_`` as ``privacy_`` says.
        """
        last: nn.Sequential | None = getattr(self, "network_", None)
        if last is None:
            return None
        held = [*(layer.in_features for layer in linear_layers(last)), outputs]
        same = held == self._widths(features, outputs)
        return copy.deepcopy(last).train() if same else None

    def _new(self, features: int, outputs: int) -> nn.Sequential:
        """A new network, initialised from ``random_state`` alone."""
        torch.manual_seed(check_random_state(self.random_state).randint(2**31 - 1))
        layers: list[nn.Module] = []
        for inputs, width in itertools.pairwise(self._widths(features, outputs)):
            layers += [nn.Linear(inputs, width, device="cpu"), ACTIVATIONS[self.activation]()]
        return nn.Sequential(*layers[:-1])

    @torch.no_grad()
    def _outputs(self, x: Any) -> NDArray[np.float64]:
        """Outputs of the network for each row, shape (n, outputs)."""
        check_is_fitted(self)
        rows = ClippedRows(
            table(x, reset=False, estimator=self), public_norm(self.data_norm, self.n_features_in_)
        )
        # no row's output depends on which rows come with it
        network = copy.deepcopy(self.network_).double()
        step = rows_at_once(self.n_features_in_, ROWS_AT_A_TIME)
        parts = (rows[start : start + step] for start in range(0, len(rows), step))
        return np.concatenate([network(torch.from_numpy(part).double()).numpy() for part in parts])


def clip_by_noise(n: int, parameters: int, mu: float) -> float:
    """A clip norm for cross-entropy, from public numbers: more where there is less noise.

    Gradients of records that a network is wrong about are the longest, so clipping bends what it
    learns towards scores that are too sure. Noise grows with the clip norm, from
    ``sqrt(parameters) / (mu n)`` of it, whatever the steps. Two digits.
    """
    noise = math.sqrt(parameters) / (mu * n)
    return float(f"{min(MOST_CLIP, max(LEAST_CLIP, CLIP / noise ** (1 / 3))):.2g}")


def linear_layers(network: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in network if isinstance(layer, nn.Linear)]
