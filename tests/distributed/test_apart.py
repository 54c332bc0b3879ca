"""Ranks whose losses reach into each other, or whose weights, settings or records differ."""

import apart_work as work
from dpoptim.training.batches.same_order import without_folder
from ranks import run_ranks


def test_losses_and_models_that_ask_other_ranks_are_refused() -> None:
    """A mean over the rows of all ranks passes trials, where these are equally many everywhere; in
    the run one record moved the sum by 2.4 clip norms.
    """
    for errors in run_ranks(2, work.communicating):
        for name in (*work.LOSSES, "forward"):
            assert errors[name].startswith("PrivacyError: the model, loss or collate_fn commun"), (
                name,
                errors[name],
            )
            assert "dpoptim divides by the expected batch size of all ranks" in errors[name]
        assert errors["forward later"].startswith("PrivacyError: the model communicates with other")
        for name in ("fully_shard", "DistributedDataParallel", "after a step", "afterwards"):
            assert errors[name] == ""


def test_data_sets_in_another_order_are_refused_and_streams_of_each_rank_served() -> None:
    for errors in run_ranks(2, work.ordered):
        for name in ("reversed", "noisy and reversed"):
            assert errors[name].startswith("RankError: rank 1 found other records than rank 0"), (
                errors[name]
            )
            assert "sorted(glob" in errors[name]
        for name in ("same", "noisy", "generators", "sharded stream"):
            assert errors[name] == "", (name, errors[name])
    assert "ended before its part of the plan's n=59, 29 records" in errors["one too short"]


def test_weights_and_settings_that_drift_apart_are_refused_by_name() -> None:
    for errors in run_ranks(2, work.drifting):
        for name in ("rate", "rate under fully_shard"):
            assert errors[name].startswith(
                "RankError: rank 1 would not go on with the same lr (an optimizer setting) as rank"
            ), errors[name]
        assert errors["weights"].startswith(
            "RankError: rank 1 would not go on with the same weights (where other processors"
        ), errors["weights"]
        assert errors["same rate"] == errors["weights from rank 0"] == ""


def test_folders_of_machines_do_not_count_as_other_records() -> None:
    for text, counted in (
        ("/scratch/job1/a.png", "a.png"),
        ("C:\\job\\a.png", "a.png"),
        ("yes", "yes"),
        ("he/she left", "he/she left"),
    ):
        assert without_folder(text) == counted
