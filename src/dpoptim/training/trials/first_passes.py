"""First forward passes of a model, on made-up records: what it takes, writes and remembers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from dpoptim.errors import PrivacyError, SamplesInteractError
from dpoptim.gradients.hooks.computed_weights import follows_weights
from dpoptim.gradients.watch.model_watch import fix_of_kept
from dpoptim.gradients.watch.values import Values
from dpoptim.training.randomness.secret_randomness import same_randomness
from dpoptim.training.trials.deterministic_runs import Quieted, put_back, quiet, quiet_as_before
from dpoptim.training.trials.fixed_noise import RARE
from dpoptim.training.trials.made_up_records import Sample, samples
from dpoptim.training.trials.neighbours import moved, with_another_record
from dpoptim.training.trials.own_generators import generators_of

NOT_FIRST = "its outputs do not have the batch axis first"
# Draws that are tried for each of three of torch's: of numpy's and Python's generators.
SEEDS = 4
HALF = 0.5  # also of whole numbers, which are the least ones in the trials before
BY_LOSS = (  # what to try where it was not given
    "or, where the loss leaves out what is mixed (a CLIP model's similarities of all pairs, of "
    "which each record's own embeddings are used), dpoptim.attach(..., loss=loss), which tries "
    "that; "
)


class OutputsMixedError(SamplesInteractError):
    """Records are mixed in outputs of the model; a loss may leave these out.

    Attributes:
        where: the layer in which they meet first, in words; "" where nobody knows.
    """

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where = where


def outputs_mixed(when: str = "", where: str = "") -> OutputsMixedError:
    """The error, of mixing that is seen ``when``, and ``where``: see `first_mixing`."""
    message = (
        f"records are mixed in the forward pass{when}: replacing one changed the outputs of "
        f"others{where and f', first {where}'}. Usual causes: batch statistics, attention or "
        "sorting across the batch, a scale or step size taken from the batch (series of which "
        "nothing was observed, scaled by the batch's mean; adaptive solvers of ODEs), a state that "
        "is kept from the batch before, records on another "
        "axis than the first (batch_axis=1). Fix: let each record's output depend on that record "
        f'alone; {BY_LOSS}or isolation="alone", in which no record meets another.'
    )
    return OutputsMixedError(message, where)


def first_sample(
    model: nn.Module,
    train_set: Dataset[Any],
    batch_axis: int | None,
    collate: Callable[[list[Any]], Any] | None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
) -> tuple[Sample | None, str]:
    """A call that the model takes, returning records on their axis; else None, and why.

    Raises:
        SamplesInteractError: the model's first forward pass writes into what it is made of.
    """
    values = Values([*model.named_buffers(), *model.named_parameters()])
    with put_back(model):
        for module in model.modules():
            if follows_weights(module):  # between steps
                module.eval()
        found = working_sample(model, train_set, batch_axis, collate, loss)
        refuse_written(values, model)
    generators_of(model, anew=True)  # also those that a first pass makes
    return found


def working_sample(
    model: nn.Module,
    train_set: Dataset[Any],
    batch_axis: int | None,
    collate: Callable[[list[Any]], Any] | None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
) -> tuple[Sample | None, str]:
    """`first_sample`, which puts everything back."""
    reasons = []
    for candidate in samples(model, train_set, collate, loss):
        on_first = not candidate.axis and not candidate.second
        sample = candidate.time_first() if batch_axis == 1 and on_first else candidate
        try:
            sample = sample.tried(model)
            if sample.returned:
                with_another_record(model, sample, (1.0,))  # takes others of this form, too
                return sample, ""
            reasons.append(NOT_FIRST)
        except PrivacyError:
            raise
        except Exception as error:  # whatever the user's model raises on made-up input
            reasons.append(raised_on_random(error))
    return None, reasons[0] if reasons else "records are not made of tensors"


def raised_on_random(error: Exception) -> str:
    """Why nothing was tried, without what was raised."""
    return f"the model raised {type(error).__name__} on random input"


@torch.no_grad()
def refuse_memory(model: nn.Module, sample: Sample) -> None:
    """Refuse a model that computes another output for a record after another one.

    In the mode in which it is trained: what it does in evaluation says nothing of that.

    Raises:
        SamplesInteractError: so records would meet even where they pass alone.
    """
    one, other = sample.records([0]), sample.records([1])
    found = []
    with quiet(model, lambda: one.outputs(model), as_trained=True):
        own = generators_of(model)
        for each in (other, one, one):
            with same_randomness(own):
                found.append(each.outputs(model))
    if any(map(moved, *found[1:])):
        raise SamplesInteractError(
            "the model keeps something from one forward pass to the next (hidden states, a memory, "
            "a count of calls): what it computed for a record depended on those before, so that "
            "records would meet even where they pass alone. Fix: let each forward pass begin anew; "
            "a recurrent layer is given no state of an earlier batch, calls are counted outside of "
            "the model, and random numbers are drawn from torch's generator."
        )


def refuse_mixing_by_chance(model: nn.Module, sample: Sample, quieted: Quieted) -> None:
    """Refuse a model that mixes records where random numbers say so, as manifold mixup does.

    In the mode in which it is trained, by small, middling and large numbers of torch's generators,
    and some of numpy's and Python's, which are drawn once more for the other record.

    Args:
        quieted: how the model was made deterministic.

    Raises:
        OutputsMixedError: it does. What it does in a few batches of a hundred may not be seen,
            where these are chosen by numpy's or Python's numbers.
    """
    trains = replace(quieted, evaluates=False)
    seeds = SEEDS if quieted.elsewhere else 1  # torch's numbers are the same with any
    for first, uniform in enumerate((RARE, HALF, 1 - RARE)):
        with quiet_as_before(model, trains, uniform), torch.no_grad():
            own = generators_of(model)
            for seed in range(first * seeds, (first + 1) * seeds):
                with same_randomness(own, seed):
                    before = sample.outputs(model)
                with same_randomness(own, seed):
                    after = with_another_record(model, sample, (1.0,)) or before
                if any(moved(a[1:], b[1:]) for a, b in zip(before, after, strict=True)):
                    raise outputs_mixed(" now and then, by random numbers")


def refuse_written(values: Values, model: nn.Module) -> None:
    """Refuse a model whose forward passes have written into its parameters or buffers.

    Or have put others in their places, as ``self.mean = 0.9 * self.mean + 0.1 * x.mean(0)`` does.
    """
    now = dict([*model.named_buffers(), *model.named_parameters()])
    pairs = ((name, t, now.get(name, t)) for name, t in values.tensors)
    alike = ((name, t, new) for name, t, new in pairs if type(t) is type(new) and t is not new)
    # a table that has grown has another shape
    replaced = (name for name, t, new in alike if t.shape == new.shape and not torch.equal(t, new))
    written = values.changed() or next(replaced, None)
    if written is not None:
        raise SamplesInteractError(
            f"the forward pass writes into {written!r}: records would be mixed through it, and it "
            f"would carry them out of the model without noise. Fix: {fix_of_kept(written)}; a "
            "counter of passes as a plain number, self.steps = 0; what "
            "the first batch initialises (ActNorm, say), initialise from public or made-up records "
            "before attaching; a masked weight, self.weight.data *= mask, is computed anew, "
            "F.conv2d(x, self.weight * self.mask)."
        )
