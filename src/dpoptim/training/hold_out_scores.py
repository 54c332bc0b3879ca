"""Scores of a model on private hold-out records, on the ledger of its training."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from dpoptim.accounting.ledger import Ledger
from dpoptim.distributed.rank_signals import EVALUATE
from dpoptim.errors import PrivacyError
from dpoptim.evaluation import ClassifierScores, RegressorScores
from dpoptim.target_range import TargetBound
from dpoptim.training.batches.batch_loader import BatchLoader
from dpoptim.training.batches.collation import collate_records
from dpoptim.training.batches.privacy_units import Persons
from dpoptim.training.batches.repeated_records import refuse_repeated_records
from dpoptim.training.hold_out import evaluate_hold_out
from dpoptim.training.public_figures import PublicFigures


class HoldOutScores(PublicFigures):
    """Scores of `PrivateTraining` on private records that it was not trained on."""

    model: nn.Module
    _loader: BatchLoader

    def evaluate(
        self,
        hold_out: Dataset[Any],
        *,
        epsilon: float,
        delta: float | None = None,
        n: int | None = None,
        target_bound: TargetBound | None = None,
        persons: Sequence[Any] | None = None,
        outputs: Callable[[nn.Module, Any], tuple[Tensor, Tensor]] | None = None,
        confidence: float = 0.95,
        ledger: Ledger | None = None,
        noise_seed: int | None = None,
    ) -> ClassifierScores | RegressorScores:
        """Score the model as it is on *private* records, with noise, charged to their ledger.

        Of several processes all call it after the same step, with the same records (and each with a
        ledger, if any, of which rank 0's is charged); one scores.

        Args:
            hold_out: records with the target last, or dictionaries with "labels", collated as
                attach was told; none of them in the training data. Which is which must have been
                decided for each record (or person) by itself.
            ledger: of the hold-out, where its records are other people's than the training's; None:
                this run's, which then counts training and scores together.
            epsilon: what these scores may cost, on top of the training.
            delta: default the plan's.
            n: public number of records in it (of persons); needed where the ledger counts under
                add-or-remove-one.
            target_bound: public bound on |y|, or (lowest, highest), for a model with one output;
                one with several is scored as a classifier, its outputs as logits.
            persons: the owner of each record; needed where the plan's unit is a person. Only the
                first record of each counts.
            outputs: from the model and a batch of one record to its outputs (1, k) and its target,
                by nothing that it keeps from other records, which is on trust; default: what the
                model returns for the other entries, or its ``.logits``.
            confidence: of the intervals, in (0, 1); they include the noise.
            noise_seed: repeatable noise, for tests; the guarantee then says that it is not for
                release.

        Returns:
            accuracy, confusion matrix, log-loss, AUC and calibration, or R2 and squared error; all
            may be published.

        Raises:
            PrivacyError: in the middle of a step, or after the `with`; or the data set shows one
                record at two of its places.
            ValueError, TypeError: a setting out of range, or no such data set; before anything is
                spent.
            BudgetExceeded: the ledger does not admit it; nothing is drawn.
            RankError: of several processes, not all call it after the same step; named.

        **Guarantee.** The scores' ``guarantee``, under the ledger's relation and the plan's unit,
        charged before the noise is drawn. Scores may decide what happens next, such as `finish`, as
        outputs may.
        """
        self._require_attached()
        if self._steps.state not in ("idle", "released"):
            raise PrivacyError(
                "private.evaluate is for between two steps. Fix: call it after optimizer.step(), "
                "or score the saved model with dpoptim.evaluation."
            )
        if (persons is None) != (self._units.persons is None):
            raise ValueError(
                f"persons: this training protects each {self._units.name}, and its scores must, "
                "too. Fix: persons= as attach has it."
            )
        if not (hasattr(hold_out, "__len__") and hasattr(hold_out, "__getitem__")):
            raise TypeError(
                "hold_out must be a data set with records at places, since each is scored by "
                f"itself, got {type(hold_out).__name__}. Fix: loader.dataset of a DataLoader; the "
                "records of a stream in a list."
            )
        records = len(hold_out)
        rows: Sequence[int] = range(records)
        if persons is not None:
            rows = Persons.of(persons, records, 1, "hold_out").first_rows.tolist()
        else:
            refuse_repeated_records(hold_out, "hold_out")
        self._ranks.begin(EVALUATE, self.steps_done)
        whose = "this run's" if ledger is None else "of the hold-out"
        self._ranks.agree({"hold_out": f"{len(rows)} of {records}", "ledger": whose})
        own = None if ledger is None else self._ranks.ledger(ledger).of_units(self._units.name)
        charged = self._ledger if own is None else own
        return evaluate_hold_out(
            self.model,
            hold_out,
            rows=rows,
            unit=self._units.name,
            collate=self._loader.collate(None) or collate_records,
            outputs=outputs,
            epsilon=epsilon,
            delta=self.plan.delta if delta is None else delta,
            neighboring=charged.neighboring,
            n=n,
            target_bound=target_bound,
            confidence=confidence,
            ledger=charged,
            noise_seed=noise_seed,
        )
