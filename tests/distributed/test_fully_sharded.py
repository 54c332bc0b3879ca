"""Models under fully_shard (FSDP2): as private and as exact as in one process."""

from typing import Any

import pytest

import fully_sharded_work as work
from ranks import run_ranks

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("flat", "whole", {}),
    ("flat", "per block", {"physical_batch_size": 4}),
    ("flat", "adapters", {}),
    ("dice", "per block", {"physical_batch_size": 7}),
    ("ftrl", "blocks alone", {}),
    ("flat", "per block", {"autocast": True}),
    ("flat", "whole", {"isolation": "vmap"}),
    ("flat", "adapters", {"isolation": "alone"}),
    ("per-layer", "per block", {}),
    ("quantile along", "per block", {}),
]


@pytest.mark.parametrize(
    ("size", "cases"),
    [(2, CASES[:5]), *(pytest.param(size, CASES, marks=pytest.mark.slow) for size in (2, 3))],
)
def test_without_noise_sharded_models_train_as_in_one_process(
    size: int, cases: list[tuple[str, str, dict[str, Any]]]
) -> None:
    """Same coins, no noise, float32: whole, per block, with adapters, in pieces, under autocast."""
    alone = work.without_noise(0, cases)
    for results in run_ranks(size, work.without_noise, cases):
        for case, result, expected in zip(cases, results, alone, strict=True):
            assert float((result - expected).abs().max()) < 1e-6, case


@pytest.mark.slow
def test_each_bug_is_noticed_and_the_code_as_it_is_is_not() -> None:
    (expected,) = work.without_noise(0, [("flat", "per block", {})])
    for found in run_ranks(2, work.caught_mutants, expected):
        assert not found.pop("none")
        missed = [name for name, noticed in found.items() if not noticed]
        assert not missed


def test_between_steps_each_rank_holds_its_parts_alone() -> None:
    for seen in run_ranks(2, work.bytes_held):
        assert 0.4 * seen["all"] < seen["held"] < 0.65 * seen["all"]  # uneven rows
        assert seen["gathered"] == seen["odd gradients"] == 0


def test_what_cannot_be_done_is_refused_by_name() -> None:
    said = {
        "policy": "MixedPrecisionPolicy",
        "two axes": "not as one shard a process",
        "tensor parallel": "but not one of fully_shard's",
        "value": "value clipping is not supported for models under fully_shard",
        "partial": "partial_backward=True is not supported",
        "vmap": "parts of it are under fully_shard",
        "borrowed": "'layer.weight' was used outside its module's forward pass",
    }
    for errors in run_ranks(2, work.refused):
        assert errors.pop("rows are fine") == ""
        for case, name in said.items():
            assert name in errors[case], (case, errors[case])
