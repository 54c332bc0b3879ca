"""Small networks with differential privacy, in scikit-learn's manner: DP-SGD on Poisson
batches.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, get_args

import dp_accounting
import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.calibration import calibrate_event
from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import one_of, real_number, whole_number
from dpoptim.estimators.chunks import Chunks
from dpoptim.estimators.scope import public_number_of_records, with_scope
from dpoptim.estimators.table import (
    bounded_targets,
    clip_rows,
    public_classes,
    public_norm,
    refuse_weights,
    stated_delta,
    table,
)
from dpoptim.methods import DPSGD
from dpoptim.plan import Plan
from dpoptim.recipes import recipe
from dpoptim.training.attach import attach
from dpoptim.training.tail_average import TailAverage

Activation = Literal["tanh", "relu", "gelu"]
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}
PIECE = 4096  # rows at a time, in training and in prediction


class _Network(BaseEstimator):
    """What both estimators share: bounded rows in, a network and a guarantee out."""

    privacy_: Guarantee
    network_: nn.Sequential

    @torch.random.fork_rng(devices=[])  # the caller's generator stays as it is
    def _train(
        self,
        x: NDArray[Any],
        targets: Tensor,
        outputs: int,
        loss: Callable[[Tensor, Tensor], Tensor],
        notes: tuple[str, ...],
        *,
        chunk: bool,
    ) -> None:
        """Set ``network_`` and ``privacy_``. ``loss`` gives one number a row. A chunk goes on from
        the chunks before it.
        """
        earlier: Chunks | None = getattr(self, "_chunks", None) if chunk else None
        features = x.shape[1]
        n = public_number_of_records(self.n, len(x), self.neighboring)
        delta, said = stated_delta(self.delta, n)
        norm = public_norm(self.data_norm, features)
        rows = torch.from_numpy(clip_rows(x, norm).astype(np.float32))
        plan = self._plan(n, delta, epsilon=real_number("epsilon", self.epsilon))
        one_of("activation", self.activation, get_args(Activation))
        last = self._last(features, outputs) if self.warm_start or earlier is not None else None
        network = self._new(features, outputs) if last is None else last
        if earlier is None and last is not None:
            said = (
                *said,
                "started from an earlier fit: the guarantee of that fit adds to this one's",
            )
        if self.data_norm is None:
            said = (
                *said,
                f"rows were clipped to norm sqrt({features}): scale the features by public "
                "constants",
            )
        optimizer = torch.optim.SGD(
            network.parameters(),
            lr=real_number("learning_rate", self.learning_rate),
            momentum=real_number("momentum", self.momentum),
        )
        average = TailAverage(network, plan.steps // 2)
        data = TensorDataset(rows, targets)
        label = type(self).__name__
        with attach(
            plan,
            network,
            optimizer,
            data,
            ledger=self.ledger,
            label=label,
            noise_seed=self.noise_seed,
        ) as private:
            for batch, wanted in private.batches(physical_batch_size=PIECE):
                private.backward(loss(network(batch), wanted))
                optimizer.step()
                if private.finished_step:
                    average.update(private.steps_done)
            average.swap()
            guarantee = private.spent()
        self.network_ = network.eval()
        guarantee = replace(guarantee, notes=(*guarantee.notes, *notes, *said))
        this = (np.zeros(0), n, guarantee)  # the network itself is what goes on
        self._chunks = Chunks(*this) if earlier is None else earlier.followed_by(*this)
        self.privacy_ = with_scope(self._chunks.guarantee, self.ledger)

    def _plan(
        self,
        n: int,
        delta: float,
        *,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
    ) -> Plan:
        """The plan of a fit on ``n`` records, for an ``epsilon`` or with a
        ``noise_multiplier``.
        """
        return DPSGD(real_number("clip_norm", self.clip_norm)).plan(
            n=n,
            batch_size=min(recipe("mlp", n).batch_size, n)
            if self.batch_size is None
            else self.batch_size,
            epochs=real_number("epochs", self.epochs),
            delta=delta,
            neighboring=self.neighboring,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
        )

    def epsilon_after(
        self, events: Sequence[dp_accounting.DpEvent], *, n: int, epsilon: float, delta: float
    ) -> float:
        """The epsilon of a fit that costs ``epsilon`` together with ``events``, which were fixed
        before; public.

        For a pipeline that shares out one budget: composing the events costs less than adding up
        epsilons.
        """

        def whole(noise_multiplier: float) -> dp_accounting.DpEvent:
            fit = self._plan(n, delta, noise_multiplier=noise_multiplier).event
            return dp_accounting.ComposedDpEvent([*events, fit])

        noise = calibrate_event(whole, epsilon=epsilon, delta=delta, neighboring=self.neighboring)
        return compute_epsilon(
            self._plan(n, delta, noise_multiplier=noise).event, delta, self.neighboring
        ).epsilon

    def _widths(self, features: int, outputs: int) -> list[int]:
        hidden = (
            whole_number("hidden_layer_sizes", width, least=1) for width in self.hidden_layer_sizes
        )
        return [features, *hidden, outputs]

    def _last(self, features: int, outputs: int) -> nn.Sequential | None:
        """A copy of the last network, to go on from, if it has the right shape: a fit that is
        interrupted leaves ``network_`` as ``privacy_`` says.
        """
        last: nn.Sequential | None = getattr(self, "network_", None)
        if last is None:
            return None
        held = [*(layer.in_features for layer in linear(last)), outputs]
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
        """What the network says of each row, shape (n, outputs)."""
        check_is_fitted(self)
        rows = clip_rows(
            table(x, reset=False, estimator=self), public_norm(self.data_norm, self.n_features_in_)
        )
        # no row's output depends on which rows come with it
        network = copy.deepcopy(self.network_).double()
        return np.concatenate(
            [network(piece).numpy() for piece in torch.from_numpy(rows).double().split(PIECE)]
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.noise_seed is None
        return tags


def linear(network: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in network if isinstance(layer, nn.Linear)]


def public_weights(class_weight: object, classes: NDArray[Any]) -> Tensor | None:
    """The classes' weights in their order over the largest of them, float32; None where all are 1.

    Clipping undoes weights above 1, since gradients are as long as the bound already; it leaves
    smaller ones their effect.

    Raises:
        ValueError: not a mapping from classes to finite weights of at least 0.
    """
    if class_weight is None:
        return None
    if not isinstance(class_weight, Mapping):
        raise ValueError(
            f"class_weight must be a mapping from classes to public weights, got {class_weight!r}: "
            "weights from the labels are private. Fix: "
            "dpoptim.preprocessing.DPClassCounts(...).fit(y).class_weight(), which is charged."
        )
    if unknown := [name for name in class_weight if name not in classes]:
        raise ValueError(f"class_weight names {unknown[0]!r}, which is none of the classes.")
    weights = [
        real_number("class_weight", class_weight.get(name, 1.0)) for name in classes.tolist()
    ]
    if not all(0 <= weight < float("inf") for weight in weights):
        raise ValueError("class_weight must hold finite numbers of at least 0.")
    largest = max(weights)
    if largest == 0:
        raise ValueError("class_weight must be above 0 for some class.")
    return torch.tensor(weights, dtype=torch.float32) / largest


class DPSGDClassifier(ClassifierMixin, _Network):
    """A feed-forward network trained by DP-SGD with cross-entropy.

    Args:
        epsilon: the budget, > 0. All of it is spent by one ``fit``.
        delta: in (1e-14, 1), or ``"auto"``: n^-1.1, n being public under the neighbouring
            relations here; said in ``privacy_``.
        hidden_layer_sizes: widths of the hidden layers.
        activation: ``"tanh"`` (bounded, which suits clipped gradients), ``"relu"`` or ``"gelu"``.
        data_norm: public bound on the Euclidean norm of a row, to which longer rows are scaled
            down; None: the square root of the number of features. It must not be read off the
            data.
        classes: all classes, as public knowledge. None: read off y, and said so in ``privacy_``.
        class_weight: public factors of the classes' losses, relative to the largest, such as those
            of `DPClassCounts.class_weight`; a class that is not named has 1. Gradients are clipped
            after weighting, so the guarantee does not depend on them. "balanced" would be read off
            the labels, and is refused.
        batch_size: expected batch. None: a fifteenth of the rows, at least 512.
        epochs: expected passes over the rows.
        learning_rate, momentum: of SGD.
        clip_norm: bound on each record's gradient.
        neighboring: ``"zero-out"`` (a record contributes nothing; the number of rows is public) or
            ``"add-or-remove-one"``, which hides how many rows there are and needs ``n``.
        n: a public estimate of the number of rows, from which batches, steps and noise are
            computed.
        warm_start: start from the network of the last fit, whose guarantee then adds up with this
            one's.
        random_state: of the initial weights; has nothing to do with the noise.
        ledger: where fits are charged, so that several cannot exceed a budget; None: nowhere.
        noise_seed: repeatable noise, for tests: the guarantee says that it is not for release.

    Attributes:
        network_: the trained ``nn.Sequential``; in: rows clipped to ``data_norm``, out: scores.
        classes_: the class labels.
        privacy_: `Guarantee` of everything that ``fit`` learnt.

    **Guarantee.** ``privacy_``, for every table. It covers one ``fit``, and its notes say what all
    runs on the ledger cost together. Choosing settings by comparing fits
    (`GridSearchCV`) multiplies what is spent, and scores on private data are releases of their
    own.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, (2_000, 3))
        >>> from dpoptim.estimators import DPSGDClassifier
        >>> y = x[:, 0] > 0
        >>> model = DPSGDClassifier(epsilon=4.0, classes=[False, True], epochs=5)
        >>> model.fit(x, y).privacy_.epsilon <= 4.0
        True
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float | Literal["auto"] = "auto",
        *,
        hidden_layer_sizes: Sequence[int] = (64,),
        activation: Activation = "tanh",
        data_norm: float | None = None,
        classes: Sequence[Any] | None = None,
        class_weight: Mapping[Any, float] | None = None,
        batch_size: int | None = None,
        epochs: float = 40,
        learning_rate: float = 1.0,
        momentum: float = 0.9,
        clip_norm: float = 1.0,
        neighboring: str = "zero-out",
        n: int | None = None,
        warm_start: bool = False,
        random_state: Any = None,
        ledger: Ledger | None = None,
        noise_seed: int | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.data_norm = data_norm
        self.classes = classes
        self.class_weight = class_weight
        self.batch_size = batch_size
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.clip_norm = clip_norm
        self.neighboring = neighboring
        self.n = n
        self.warm_start = warm_start
        self.random_state = random_state
        self.ledger = ledger
        self.noise_seed = noise_seed

    def fit(self, X: Any, y: Any, sample_weight: None = None) -> Self:
        """Train. Args: X of shape (n, features); y of shape (n,); no sample weights.

        Raises:
            ValueError: a bad table or setting, before anything is spent.
        """
        return self._learn(X, y, sample_weight, self.classes, chunk=False)

    def partial_fit(
        self, X: Any, y: Any, classes: Sequence[Any] | None = None, sample_weight: None = None
    ) -> Self:
        """Train on one more chunk of a stream, from where the chunks before it led; what ``fit``
        was given is the first.

        Every chunk may spend the whole budget, since every record is in one chunk alone; that is
        taken on trust, and said in ``privacy_``. A ledger does not know it, and is charged for
        each chunk.

        Args:
            classes: all classes, public; needed in the first call unless the estimator has its
                own.

        Raises:
            ValueError: a bad table or setting, before anything is spent.
        """
        stated: Any = self.classes if classes is None else classes
        if hasattr(self, "_chunks"):
            if classes is not None and not np.array_equal(
                np.unique(np.asarray(classes)), self.classes_
            ):
                raise ValueError(
                    "classes must be the same in every call of partial_fit; call fit to start anew."
                )
            stated = self.classes_
        elif stated is None:
            raise ValueError(
                "classes must be passed on the first call to partial_fit: later chunks may hold "
                "others."
            )
        return self._learn(X, y, sample_weight, stated, chunk=True)

    def _learn(
        self, X: Any, y: Any, sample_weight: Any, classes: Sequence[Any] | None, *, chunk: bool
    ) -> Self:
        refuse_weights(sample_weight)
        x = table(X, reset=not (chunk and hasattr(self, "_chunks")), estimator=self)
        self.classes_, numbers, notes = public_classes(classes, y, rows=len(x))
        loss = nn.CrossEntropyLoss(
            weight=public_weights(self.class_weight, self.classes_), reduction="none"
        )
        self._train(x, torch.from_numpy(numbers), len(self.classes_), loss, notes, chunk=chunk)
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities of shape (n, classes)."""
        scores = self._outputs(X)
        odds = np.exp(scores - scores.max(1, keepdims=True))
        return odds / odds.sum(1, keepdims=True)

    def predict(self, X: Any) -> NDArray[Any]:
        """The likeliest class of each row, shape (n,)."""
        likeliest = self._outputs(X).argmax(1)
        return self.classes_[likeliest]


class DPSGDRegressor(RegressorMixin, _Network):
    """A feed-forward network trained by DP-SGD with squared error.

    Args:
        target_bound: required; public bound on |y|; targets are clipped to it. It must not be read
            off the data. The error is measured in its units.

    The other arguments, and the **Guarantee**, as for `DPSGDClassifier`.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, (2_000, 3))
        >>> from dpoptim.estimators import DPSGDRegressor
        >>> model = DPSGDRegressor(epsilon=4.0, target_bound=1.0, epochs=5, hidden_layer_sizes=(8,))
        >>> model.fit(x, x[:, 0]).predict(x).shape
        (2000,)
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float | Literal["auto"] = "auto",
        *,
        hidden_layer_sizes: Sequence[int] = (64,),
        activation: Activation = "tanh",
        data_norm: float | None = None,
        target_bound: float | None = None,
        batch_size: int | None = None,
        epochs: float = 40,
        learning_rate: float = 0.1,
        momentum: float = 0.9,
        clip_norm: float = 1.0,
        neighboring: str = "zero-out",
        n: int | None = None,
        warm_start: bool = False,
        random_state: Any = None,
        ledger: Ledger | None = None,
        noise_seed: int | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.data_norm = data_norm
        self.target_bound = target_bound
        self.batch_size = batch_size
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.clip_norm = clip_norm
        self.neighboring = neighboring
        self.n = n
        self.warm_start = warm_start
        self.random_state = random_state
        self.ledger = ledger
        self.noise_seed = noise_seed

    def fit(self, X: Any, y: Any, sample_weight: None = None) -> Self:
        """Train. Args: X of shape (n, features); y of shape (n,); no sample weights.

        Raises:
            ValueError: a bad table or setting, before anything is spent.
        """
        return self._learn(X, y, sample_weight, chunk=False)

    def partial_fit(self, X: Any, y: Any, sample_weight: None = None) -> Self:
        """Train on one more chunk of a stream; see `DPSGDClassifier.partial_fit`."""
        return self._learn(X, y, sample_weight, chunk=True)

    def _learn(self, X: Any, y: Any, sample_weight: Any, *, chunk: bool) -> Self:
        refuse_weights(sample_weight)
        x = table(X, reset=not (chunk and hasattr(self, "_chunks")), estimator=self)
        scaled = torch.from_numpy(
            bounded_targets(y, self.target_bound, rows=len(x)).astype(np.float32)
        )
        self._train(x, scaled[:, None], 1, squared_errors, (), chunk=chunk)
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Predictions of shape (n,)."""
        return self._outputs(X)[:, 0] * real_number("target_bound", self.target_bound)


def squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """One a row: (rows, 1), (rows, 1) -> (rows,)."""
    return (outputs - targets).square().flatten(1).sum(1)
