"""Ranks whose losses reach into each other, or whose weights, settings or records differ."""

import apart_work as work
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
