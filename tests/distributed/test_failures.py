"""Ranks that do not agree, fail, leave or die: an error on every other rank that names them, in
time.
"""

from pathlib import Path

import pytest
import torch

import distributed_work as work
import dpoptim
from ranks import run_ranks


def test_ranks_that_differ_are_named_at_attach() -> None:
    names = {
        "plan": "plan",
        "values": "values of the parameters",
        "optimizer": "optimizer",
        "settings": "optimizer settings",
        "reduction": "loss_reduction",
        "data": "data set",
        "order": "data set",
        "frozen": "trainable parameters",
    }
    for errors in run_ranks(3, work.differing):
        for case, name in names.items():
            assert errors[case].startswith(
                "RankError: ranks 1, 2 would not go on with the same " + name + " as"
            ), case
        assert "must agree" in errors["number of records"]
        for kind in ("tensors", "items"):
            assert errors[f"same {kind} as shards"].startswith(
                "RankError: sharded=True, but ranks 0 and 1 have the same records"
            )
        assert "and 2 have the same records, or some of them" in errors["shards filled up"]
        assert errors["works after all that"] == ""


def test_what_one_rank_refuses_ends_attach_on_all() -> None:
    first, second = run_ranks(2, work.differing)
    assert first["refused"].startswith("RankError: rank 1 failed in dpoptim.attach")
    assert "replace_batchnorm" in second["refused"]


@pytest.mark.parametrize("sharded", [False, True])
def test_what_is_refused_while_others_compare_ends_attach_on_all(sharded: bool) -> None:
    """By an error on every rank; torch.distributed would abort those that say something else."""
    first, second, third = run_ranks(3, work.refused_by_one, sharded)
    assert second.startswith("PrivacyError: LBFGS")
    for other in (first, third):
        assert other.startswith("RankError: ")
        assert "rank 1" in other


def test_two_runs_of_the_same_ranks_are_never_added_up() -> None:
    """Whose steps the ranks take in different orders; their sums have the same length."""
    for rank, error in enumerate(run_ranks(2, work.in_another_order)):
        assert error.startswith(f"RankError: rank {rank} is about to release step 0, but rank")
        assert f"rank {1 - rank} goes on with, or left, another run" in error


def test_ranks_of_other_numbers_of_groups_meet() -> None:
    first, *others = run_ranks(3, work.groups_that_overlap)
    assert all(torch.equal(first, other) for other in others)


def test_another_path_key_or_ledger_on_a_rank_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """A checkpoint of such ranks could not be read, and a run would be charged elsewhere."""
    said = {
        "path": "RankError: rank 1 would not go on with the same path in private.save as rank 0",
        "key": "RankError: rank 1 would not go on with the same checkpoint_key as rank 0",
        "ledger": "ValueError: ledger was given on rank 1, but not on rank 0",
        "resume on rank 0": "RankError: rank 1 would not go on with the same resume",
        "resume on rank 1": "RankError: rank 1 would not go on with the same resume",
    }
    path = tmp_path / "run"
    for found in run_ranks(2, work.otherwise_on_a_rank, str(path)):
        assert found.keys() == said.keys()
        for case, error in said.items():
            assert found[case].startswith(error), case
    assert [each.name for each in tmp_path.iterdir()] == ["run.ledger"]
    with dpoptim.Ledger(tmp_path / "run.ledger") as ledger:
        assert not ledger.entries()


def test_rank_0_reserves_once_and_all_hear_its_refusal(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    everyone = run_ranks(3, work.budget, str(path))
    assert len({each["first"] for each in everyone}) == 1
    assert everyone[0]["entries"] == [("committed", everyone[0]["first"])]
    for each in everyone:
        assert each["second"].startswith("BudgetExceeded: ")
        assert each["second"] == everyone[0]["second"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_rank_that_raises_is_named_by_the_others(wrapped: bool) -> None:
    first, second, third = run_ranks(3, work.one_raises, "raises", wrapped)
    assert second == "KeyError: 'of rank 1 alone'"
    for other in (first, third):
        assert other.startswith("RankError: ")
        assert "rank 1 left it with an error" in other


@pytest.mark.parametrize("attached", ["wrapper", "bare model"])
def test_a_static_graph_is_refused_by_name_before_the_charge(attached: str) -> None:
    """Without the refusal the wrapper's own training is wrong when the run is over."""
    for heard, charged in run_ranks(2, work.static_graph, attached):
        assert heard.startswith("PrivacyError: ")
        assert "static_graph=True" in heard
        assert "Fix: wrap the model without it" in heard
        assert charged == 0


def test_a_rank_that_leaves_early_or_is_ahead_ends_the_run() -> None:
    first, second = run_ranks(2, work.one_raises, "leaves", False)
    assert "rank 1 left the run (step 2)" in first
    assert "does not count as completed" in second
    first, second = run_ranks(2, work.one_raises, "ahead", False)
    assert "is about to release step 2, but rank 1 releases (step 3)" in first
    assert "is about to release step 3, but rank 0 releases (step 2)" in second


def test_a_call_of_all_that_one_rank_makes_alone_is_named(tmp_path: Path) -> None:
    """At once, on both; what one may ask alone disturbs nobody."""
    first, second = run_ranks(2, work.on_one_rank, str(tmp_path / "run"))
    assert "is about to save step 2, but rank 1 releases (step 2)" in first["save"]
    assert "rank 0 calls private.save (step 2)" in second["save"]
    assert "is about to end the run after step 2, but rank 1 releases" in first["finish"]
    assert "rank 0 calls private.finish (step 2)" in second["finish"]
    assert first["no refund"] == second["no refund"] == "None"
    assert not (tmp_path / "run").exists()


def test_a_rank_that_is_killed_is_named_by_the_survivors() -> None:
    first, second, third = run_ranks(3, work.dies)
    assert third == "died"
    for survivor in (first, second):
        assert survivor.startswith("RankError: ")
        assert "rank 2 gave no sign of life" in survivor
        assert "The time-out is 0:05:00" in survivor


@pytest.mark.parametrize("destroys", [False, True])
def test_no_thread_of_a_group_is_left_when_python_ends(destroys: bool) -> None:
    """One that still held a tensor would end the process by SIGABRT, now and then."""
    assert run_ranks(2, work.ends, destroys) == [(True, False)] * 2
