"""A run directory for one's own training or estimator: model, plan, certificate and report."""

import datetime
import hashlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import singledispatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpoptim.documents import sha256_of
from dpoptim.errors import PrivacyError
from dpoptim.estimators.repeats import CountsFits
from dpoptim.files import write_atomically
from dpoptim.printable import printable
from dpoptim.runs.assumptions import OTHER_WEIGHTS
from dpoptim.runs.certificate import write_certificate
from dpoptim.runs.certify_fit import fit_handed_over
from dpoptim.runs.outcome import try_writing
from dpoptim.runs.report import report
from dpoptim.runs.result import LedgerEntry, RunResult
from dpoptim.runs.train import package_versions
from dpoptim.runs.vouching import vouchers
from dpoptim.training.assumptions import in_order
from dpoptim.training.private_training import PrivateTraining

NOT_AS_LEFT = (
    "these weights are not known to be those that the run left, and the run's guarantee is not of "
    "what other training on its records makes: one step without privacy undoes it. The certificate "
    f"lists on trust: {OTHER_WEIGHTS.text}. Fix: certify the model before anything else changes "
    "it; of a mean of the run's iterates, say, let somebody who knows what went into it vouch for "
    "that line (vouched_by=)."
)


def certify(
    trained: Any,
    folder: str | Path,
    *,
    data: str,
    weights: Mapping[str, Any] | None = None,
    settings: Mapping[str, str] | None = None,
    vouched_by: str | Mapping[str, str] | None = None,
) -> Path:
    """Write what whoever signs is handed: model, plan, certificate and report.

    After the last step, inside the ``with`` or after it; or after a fit. ``dpoptim verify`` and
    ``sign`` take the folder, and of a training ``audit --run``. Of several processes, one calls
    it, and of an estimator that is the first.

    Args:
        trained: the training, as `attach` returned it (`PrivateTrainer` and Lightning's callback
            keep it as ``private``), whose model becomes ``model.pt``; or a fitted estimator,
            `PrivatePipeline` or `DPSearchCV`, pickled as ``model.pkl`` without its ledger.
        folder: made if it is not there; files of an earlier certificate are replaced.
        data: the data set's name, for people.
        weights: what is to be released, as a state dict; None: the model's, as it is now. If
            these are not the weights that the run left (nor its random iterate), what they are
            made of is taken on trust: a line of the basis says so, for somebody to vouch for, and
            a warning. Of a model spread by ``fully_shard``, a whole one, after the ``with``.
        settings: other settings for people, all public: learning rate, schedule, preparation.
        vouched_by: who vouches for what is taken on trust: one name for all of it, or names by a
            part of the line that each vouches for. The report has a place for those not named.

    Returns:
        the folder.

    Raises:
        PrivacyError: nothing was released yet; or a fit has no proven guarantee, was made on
            several chunks of a stream, or is not on the ledger that it names.
        TypeError, ValueError: weights or settings that are none, or spread over processes; a name
            that is empty.
        OSError: the folder cannot be written; the run is as it was.

    **Guarantee.** That of the run, which `PrivateTraining.spent` or ``privacy_`` says, for
    everything in the folder: model and figures are what was released, or public. What
    ``settings``, and weights that are not those that the run left, are made of is the caller's
    word: of the weights it stands among what is taken on trust.

    Examples:
        >>> import torch
        >>> import dpoptim
        >>> model = torch.nn.Linear(5, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 5))
        >>> plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        ...     n=100, batch_size=10, steps=2, epsilon=2.0, delta=1e-4
        ... )
        >>> with dpoptim.attach(plan, model, optimizer, data) as private:
        ...     for (x,) in private.batches():
        ...         private.backward(model(x).square().sum(1))
        ...         optimizer.step()
        >>> folder = dpoptim.certify(private, "runs/own", data="made up")  # doctest: +SKIP
    """
    if not data.strip():
        raise ValueError("data: the certificate needs a name of the data set, for people.")
    said = settings or {}
    if not all(isinstance(each, str) for pair in said.items() for each in pair):
        raise TypeError("settings: names and values are text, such as {'learning rate': '0.1'}.")
    name, content, result = handed_over(trained, data, weights, said)
    result = replace(result, vouched_by=vouchers(result.basis, vouched_by))
    if OTHER_WEIGHTS in result.basis:
        warnings.warn(NOT_AS_LEFT, stacklevel=2)
    page, folder = report(result), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try_writing(folder)
    write_atomically(folder / name, content)
    write_atomically(folder / "plan.json", result.plan.to_json() + "\n")
    files = {"report.html": sha256_of(page)}
    write_certificate(folder / "certificate.json", replace(result, files=files))
    write_atomically(folder / "report.html", page)
    return folder


@singledispatch
def handed_over(
    trained: object, data: str, weights: Mapping[str, Any] | None, settings: Mapping[str, str]
) -> tuple[str, bytes, RunResult]:
    """The model's file by name and content, and the public figures of what trained it.

    Whatever can be certified is registered here by its class.
    """
    raise TypeError(
        "dpoptim.certify takes what dpoptim.attach returned, or a fitted estimator, "
        f"PrivatePipeline or DPSearchCV of dpoptim, got {type(trained).__name__}."
    )


@handed_over.register
def _(
    trained: CountsFits, data: str, weights: Mapping[str, Any] | None, settings: Mapping[str, str]
) -> tuple[str, bytes, RunResult]:
    if weights is not None:
        raise TypeError("weights: an estimator is written as its fit left it; leave them out.")
    return fit_handed_over(trained, data, settings)


@handed_over.register
def _(
    trained: PrivateTraining,
    data: str,
    weights: Mapping[str, Any] | None,
    settings: Mapping[str, str],
) -> tuple[str, bytes, RunResult]:
    if trained.steps_done == 0:
        raise PrivacyError(
            "dpoptim.certify was called before the run released anything: there is no model to "
            "certify yet. Fix: call it after the last optimizer.step()."
        )
    content = file_of(trained.model.state_dict() if weights is None else weights)
    own = trained.model_is_as_left if weights is None else trained.left_weights(weights)
    digest = hashlib.sha256(content).hexdigest()
    return "model.pt", content, result_of(trained, data, settings, digest, own)


def file_of(weights: Mapping[str, Any]) -> bytes:
    """A state dict as a file. ValueError: it is spread over processes; TypeError: it is none."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights: expected a state dict, got {type(weights).__name__}.")
    if any(isinstance(each, Tensor) and hasattr(each, "full_tensor") for each in weights.values()):
        raise ValueError(
            "weights: the model is spread over processes. Fix: gather a whole state dict in all of "
            "them (torch.distributed.checkpoint.state_dict.get_model_state_dict with "
            "full_state_dict=True), and give it as weights= in one."
        )
    buffer = io.BytesIO()
    torch.save(dict(weights), buffer)
    return buffer.getvalue()


def result_of(
    private: PrivateTraining, data: str, settings: Mapping[str, str], digest: str, own: bool
) -> RunResult:
    """Public figures of the run.

    Args:
        own: whether the file is known to have the weights that the run left.
    """
    optimizers = ", ".join(type(each).__name__ for each in private.optimizers)
    done, planned = private.steps_done, private.plan.steps
    said = {
        **{printable(name): printable(value) for name, value in settings.items()},
        "loop": "of one's own, around dpoptim.attach",
        "optimizer": optimizers,
        **(
            {}
            if own
            else {"weights": "not known to be those that the run left: see what is on trust"}
        ),
        **({} if done == planned else {"ended": f"after {done} of {planned} steps"}),
    }
    return RunResult(
        data_name=printable(data),
        model_name=type(private.model).__name__,
        classes=0,
        parameters=sum(p.numel() for p in private.model.parameters()),
        plan=private.stated_plan,
        guarantee=private.spent(),
        basis=private.basis if own else in_order((*private.basis, OTHER_WEIGHTS)),
        settings=said,
        seconds=None,
        ledger=entry_of(private),
        private_scores=None,
        comparison_scores=None,
        versions=package_versions(),
        finished=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        model_sha256=digest,
    )


def entry_of(private: PrivateTraining) -> LedgerEntry | None:
    """The ledger's entry of the run; None without noise."""
    if private.reservation is None:
        return None
    ledger = private.ledger
    path = None if ledger.path is None else str(ledger.path)
    return LedgerEntry(path, ledger.dataset, private.reservation, str(ledger.remaining()))
