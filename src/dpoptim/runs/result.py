"""Public figures of a finished run, of which certificate and report are made."""

from dataclasses import dataclass

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.assumptions import Assumption, trusted
from dpoptim.runs.fit_record import Promise


@dataclass(frozen=True)
class LedgerEntry:
    """The ledger's entry of the run. ``path`` is None for a ledger in memory."""

    path: str | None
    dataset: str
    reservation: str
    remaining: str


@dataclass(frozen=True)
class RunResult:
    """A finished private run.

    Attributes:
        data_name, model_name: for people.
        classes: number of labels. parameters: trainable numbers in the model.
        plan, guarantee, basis: the promise, what was spent, and on what it rests.
        settings: public settings in the order to print (optimizer, learning rate, seed, ...).
        seconds: wall time of the private training; None on private data, which it may depend on.
        ledger: where it was charged (None: the noise was off).
        private_scores: accuracy or R2 (`measure`) on a hold-out declared public, after each epoch
            in order; None otherwise.
        comparison_scores: the same model trained without privacy, on data declared public; None
            otherwise.
        versions: package name -> version; and what formed gradients of single records.
        finished: local date and time, ISO 8601.
        model_sha256: of the file that holds the model; None if it was not written.
        files: SHA-256 of other files of the run, by name; see `run_files`. None: not known.
        vouched_by: who vouches for what is taken on trust, by line; None: nobody is named.
    """

    data_name: str
    model_name: str
    classes: int
    parameters: int
    plan: Promise
    guarantee: Guarantee
    basis: tuple[Assumption, ...]
    settings: dict[str, str]
    seconds: float | None
    ledger: LedgerEntry | None
    private_scores: tuple[float, ...] | None
    comparison_scores: tuple[float, ...] | None
    versions: dict[str, str]
    finished: str
    model_sha256: str | None = None
    files: dict[str, str] | None = None
    vouched_by: dict[str, str] | None = None

    @property
    def measure(self) -> str:
        """Name of the scores: a number that is predicted has no classes."""
        return "accuracy" if self.classes else "R2"


def kind_of_model(name: str, *, classifies: bool) -> str:
    """A model's name for people: a softmax of one number is no softmax."""
    return "linear model" if name == "softmax" and not classifies else name


def same_ledger(dataset: str, by: str) -> Assumption:
    """Trust that a ledger rests on. Args: by: what named the data set."""
    return trusted(
        "every other use of these records is charged to the same ledger, which knows them by "
        f"name alone: {dataset!r}, {by}"
    )
