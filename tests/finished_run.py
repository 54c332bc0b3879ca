"""A small finished run, made by hand: what certificate and report are tested on."""

from dpoptim import DPSGD
from dpoptim.assumptions import Assumption
from dpoptim.runs.result import LedgerEntry, RunResult

SEEDED = "seeded: not for release"
UNPROVEN = Assumption("unproven", "nobody has proved <this> yet")


def small_run(
    *, noise_multiplier: float = 1.5, neighboring: str = "add-or-remove-one"
) -> RunResult:
    """20 steps on 1,000 records, with scores."""
    plan = DPSGD(clip_norm=1.0).plan(
        n=1000,
        batch_size=100,
        steps=20,
        noise_multiplier=noise_multiplier,
        delta=1e-5,
        neighboring=neighboring,
    )
    return RunResult(
        data_name="digits",
        model_name="softmax regression",
        classes=10,
        parameters=650,
        plan=plan,
        guarantee=plan.guarantee,
        basis=(*plan.basis, Assumption("trusted", "the loss is a mean")),
        settings={"optimizer": "SGD", "learning rate": "0.5"},
        seconds=1.25,
        ledger=LedgerEntry(
            "/home/somebody/secret-folder/ledger.db", "digits", "r-17", "epsilon 1 of 3"
        ),
        private_scores=(0.5, 0.7123),
        comparison_scores=(0.8, 0.9456),
        versions={"dpoptim": "0.1.0", "torch": "2.13.0"},
        finished="2026-07-25T14:03:22+02:00",
    )
