"""Rows of tables that counts select, on several ranks: the sums are those of one process, and so is
the law of what is released.
"""

from pathlib import Path

import pytest
import torch

import tables_work as work
from ranks import run_ranks


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.variants)])
def test_without_noise_tables_train_as_in_one_process(size: int) -> None:
    alone = work.without_noise(0)
    for results in run_ranks(size, work.without_noise):
        for way, parameters in results.items():
            torch.testing.assert_close(parameters, alone[way], rtol=1e-12, atol=1e-12, msg=way)
    for refusal in run_ranks(size, work.others_forgotten):  # what this must notice
        assert "the same weights" in refusal


def test_every_rank_moves_the_same_rows_by_the_same_bits() -> None:
    first, *others = run_ranks(3, work.with_noise)
    assert all(torch.equal(first, each) for each in others)


def test_rows_are_selected_and_get_noise_as_in_one_process() -> None:
    for off, spread, selected in [work.law(0), *run_ranks(3, work.law)]:
        assert abs(off) < 6
        assert abs(spread) < 6
        assert selected  # a count of 40 ranks' records, in units of its noise: 14


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(3, work.train, 0.0, "Adam", False, path)
    alone = work.train(0, optimizer="Adam")
    for parameters in run_ranks(2, work.train, 0.0, "Adam", False, "", path):
        torch.testing.assert_close(parameters, alone, rtol=1e-12, atol=1e-12)


def test_parameters_that_are_cut_are_refused_by_name() -> None:
    for error in run_ranks(2, work.fully_sharded):
        assert "PrivacyError: method sparse-sgd selects rows of whole tables" in error
