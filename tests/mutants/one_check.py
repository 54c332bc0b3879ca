"""A detector of many checks with one of them alone: the others find nothing of the mutant that this
one is for, and the library as it is has to pass all.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

ISOLATION = import_module("dpoptim.audit.isolation")
LOOPS = import_module("dpoptim.audit.refused_loops")
STATISTICS = import_module("dpoptim.audit.statistics")
SUMS = (
    "rows_of_an_earlier_pass",
    "empty_slots",
    "dropout_by_a_public_seed",
    "sorted_for_one_layer",
    "formed_a_few_at_once",
    "norms_that_count_microbatches",
    "flags_of_one_record",
    "counts_of_others_labels",
    "labels_of_others_in_own_losses",
)


@contextmanager
def alone(detector: str, check: str) -> Iterator[None]:
    """The named check of "isolation" or "statistics" is all that these look at; "": all.

    A name that is none of a check's leaves nothing, so the mutant is not caught.
    """
    patched: list[tuple[Any, str, Callable[..., Any]]] = []
    if check and detector == "isolation":
        refused, fine = LOOPS.refused, lambda: ""
        patched = [
            (LOOPS, "refused", lambda loop: loop.__name__ != check or refused(loop)),
            *((ISOLATION, each, fine) for each in SUMS if each != check),
        ]
    elif check and detector == "statistics":
        fits = {name: fit for name, fit in STATISTICS.fits().items() if name == check}
        patched = [(STATISTICS, "fits", lambda: fits)]
        if check != "sharpest_choice":
            patched.append((STATISTICS, "sharpest_choice", lambda: (0.0, 1.0)))
    with ExitStack() as stack:
        for where, name, other in patched:
            stack.enter_context(patch.object(where, name, other))
        yield
