"""Which figures of a training may be shown, and logs of these alone.

Losses and scores that a loop computes on the way are exact functions of private records. So what
is logged in training is what is known to be public; a list of what is known to be private would
miss whatever the next trainer thinks of.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from dpoptim.errors import PrivacyError
from dpoptim.training.private_training import PrivateTraining

SCORES = ("eval_", "test_", "predict_")  # how names of scores on public records begin
PUBLIC = (
    "epoch",
    "epsilon_reserved",
    "learning_rate",
    "step",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
)


def names_of_figures(names: Collection[str]) -> frozenset[str]:
    """Names that the user vouches for, checked.

    Raises:
        TypeError: one string instead of several.
    """
    if isinstance(names, str):
        raise TypeError(
            f"public_figures takes several names, got one string. Fix: public_figures=[{names!r}]."
        )
    return frozenset(names)


def is_public(name: str, vouched: Collection[str]) -> bool:
    """Whether a figure of this name is of public numbers or records, or vouched for."""
    return name in PUBLIC or name in vouched or name.startswith(SCORES)


Sink = Callable[[Mapping[str, float], int], None]


class PublicLogger:
    """Logs a private training's public figures, and your scores on public records.

    Args:
        private: what trains.
        sink: ``sink(figures, step)`` writes them: `to_tensorboard`, `to_mlflow`, or a function of
            your own.
        public_figures: further names that may be logged: you vouch that no private record takes
            part in them.

    Example::

        logger = PublicLogger(private, to_tensorboard(SummaryWriter("runs/1")))
        for x, y in private.batches():
            ...
            logger.log({"eval_accuracy": accuracy(model, public)})

    **Guarantee.** What reaches ``sink`` by itself follows from the plan and from what was released:
    steps, the epsilon that is reserved, the clip norm, the noise. Names that begin with ``eval_``,
    ``test_`` or ``predict_`` are taken to be scores on public records.
    """

    def __init__(
        self, private: PrivateTraining, sink: Sink, *, public_figures: Collection[str] = ()
    ) -> None:
        self._private, self._sink = private, sink
        self._public = names_of_figures(public_figures)

    def log(self, scores: Mapping[str, float] | None = None) -> None:
        """Log the run's public figures at its step, and ``scores``.

        Raises:
            PrivacyError: a name that is not known to be public; nothing is logged.
        """
        scores = dict(scores or {})
        for name in scores:
            if not is_public(name, self._public):
                raise PrivacyError(
                    f"{name!r} is not known to be public: figures of training batches are private. "
                    f"Fix: a name that begins with {', '.join(SCORES)}, of a score on public "
                    f"records; PublicLogger(..., public_figures=[{name!r}]) if no private record "
                    "takes part in it."
                )
        private = self._private
        figures = {
            "epsilon_reserved": private.spent().epsilon,
            "clip_norm": private.clip_norm,
            "noise_std": private.noise_std,
            "epoch": private.plan.sampler.passes(private.steps_done),
        }
        self._sink(
            {**figures, **{name: float(score) for name, score in scores.items()}},
            private.steps_done,
        )


def to_tensorboard(writer: Any) -> Sink:
    """Write scalars by a ``torch.utils.tensorboard.SummaryWriter``."""

    def write(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    return write


def to_mlflow(mlflow: Any) -> Sink:
    """Write metrics of MLflow's active run.

    Args:
        mlflow: the module.
    """
    return lambda figures, step: mlflow.log_metrics(dict(figures), step=step)
