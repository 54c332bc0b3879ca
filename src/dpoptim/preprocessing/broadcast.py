"""A pipeline that one process has fitted, in the others: what its steps have learnt.

Pickled: the ranks of one program trust each other, as `torch.distributed` does; no file is read.
"""

import pickle
from typing import Any

from sklearn.pipeline import Pipeline

LEDGER = "ledger"  # each process has its own, which none hands on


def pack(pipeline: Pipeline, learnt: tuple[str, ...]) -> bytes:
    """The fitted steps, and the attributes of the pipeline that are named, without ledgers."""
    ledgers = {
        name: value
        for name, value in pipeline.get_params(deep=True).items()
        if name.endswith(f"__{LEDGER}")
    }
    pipeline.set_params(**dict.fromkeys(ledgers))
    try:
        return pickle.dumps((dict(pipeline.steps), {name: vars(pipeline)[name] for name in learnt}))
    finally:
        pipeline.set_params(**ledgers)


def unpack(pipeline: Pipeline, handed: bytes) -> None:
    """Let the steps of ``pipeline``, the same objects as before, know what those handed know."""
    steps, learnt = pickle.loads(handed)
    for name, step in pipeline.steps:
        if hasattr(step, "get_params"):
            known: dict[str, Any] = vars(steps[name])
            vars(step).update({key: value for key, value in known.items() if key != LEDGER})
    vars(pipeline).update(learnt)
