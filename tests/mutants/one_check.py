"""A detector of many checks with one of them alone: the others find nothing of the mutant that this
one is for, and the library as it is has to pass all.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from dpoptim.audit import method_detectors

DETECTORS = import_module("dpoptim.audit.detectors")
ISOLATION = import_module("dpoptim.audit.isolation")
LOOPS = import_module("dpoptim.audit.refused_loops")
NOISE = import_module("dpoptim.audit.noise")
STATISTICS = import_module("dpoptim.audit.statistics")
SUMS = (
    "rows_of_an_earlier_pass",
    "empty_slots",
    "sorted_into_empty_slots",
    "dropout_by_a_public_seed",
    "sorted_for_one_layer",
    "formed_a_few_at_once",
    "norms_that_count_microbatches",
    "flags_of_one_record",
    "counts_of_others_labels",
    "labels_of_others_in_own_losses",
)
# and what each says where there is nothing to find
OF_NOISE: dict[str, Callable[..., Any]] = {
    "noise_pvalues": lambda noise: {},
    "tail_pvalues": lambda stream: {},
    "edge_pvalues": lambda stream: {},
    "untouched_rows_pvalue": lambda **_: 1.0,
    "freshness_pvalue": lambda: 1.0,
}
Patch = tuple[Any, str, Any]


@contextmanager
def alone(detector: str, check: str) -> Iterator[None]:
    """The named check is all that the detector looks at; "": all.

    A name that is none of a check's leaves nothing, so the mutant is not caught.
    """
    with ExitStack() as stack:
        for where, name, other in patches(detector, check) if check else ():
            stack.enter_context(patch.object(where, name, other))
        yield


def patches(detector: str, check: str) -> list[Patch]:
    """What is put in the place of the other checks."""
    if detector in ONE_CHECK:
        return ONE_CHECK[detector](check)
    assert DETECTORS.DETECTORS[detector].func is method_detectors.named_audits
    audits = {
        name: audit if name == check else lambda *_: SimpleNamespace(verdict="left out")
        for name, audit in method_detectors.AUDITS.items()
    }
    return [(method_detectors, "AUDITS", audits)]


def one_of_isolation(check: str) -> list[Patch]:
    refused, fine = LOOPS.refused, lambda: ""
    return [
        (LOOPS, "refused", lambda loop: loop.__name__ != check or refused(loop)),
        *((ISOLATION, each, fine) for each in SUMS if each != check),
    ]


def one_of_statistics(check: str) -> list[Patch]:
    fits = {name: fit for name, fit in STATISTICS.fits().items() if name == check}
    patched: list[Patch] = [(STATISTICS, "fits", lambda: fits)]
    if check != "sharpest_choice":
        patched.append((STATISTICS, "sharpest_choice", lambda: (0.0, 1.0)))
    return patched


def one_of_noise(check: str) -> list[Patch]:
    patched: list[Patch] = [
        (NOISE, each, nothing) for each, nothing in OF_NOISE.items() if each != check
    ]
    if check not in ("noise_pvalues", "freshness_pvalue"):  # which look at the gate's own
        patched.append((NOISE, "gate_noise", lambda *_, **__: []))
    return patched


def one_of_sensitivity(check: str) -> list[Patch]:
    all_audits = DETECTORS.sensitivities
    return [
        (
            DETECTORS,
            "sensitivities",
            lambda: {name: audit for name, audit in all_audits().items() if name == check},
        )
    ]


def one_of_participation(check: str) -> list[Patch]:
    only = {name: run for name, run in DETECTORS.PARTICIPATION.items() if name == check}
    return [(DETECTORS, "PARTICIPATION", only)]


def one_of_error_feedback(check: str) -> list[Patch]:
    runs = [run for run in method_detectors.DICE_RUNS if str(run[1]) == check]
    return [(method_detectors, "DICE_RUNS", runs)]


ONE_CHECK: dict[str, Callable[[str], list[Patch]]] = {
    "isolation": one_of_isolation,
    "statistics": one_of_statistics,
    "noise": one_of_noise,
    "sensitivity": one_of_sensitivity,
    "participation": one_of_participation,
    "error feedback": one_of_error_feedback,
}
