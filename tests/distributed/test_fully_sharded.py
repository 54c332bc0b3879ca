"""Models under fully_shard (FSDP2): as private and as exact as in one process."""

from pathlib import Path
from typing import Any

import pytest

import fully_sharded_work as work
from distributed_work import as_lists, with_whole_tensors
from ranks import run_ranks

# several processes each, seconds of all cores
pytestmark = pytest.mark.slow

KEY = bytes(range(32))
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
    ("scaled", "per block", {}),
    ("ftrl, drawn again", "per block", {}),
    ("flat", "per block", {"projection": 0.3, "random_iterate": True}),
    ("dice", "whole", {"by": "adam_bc"}),
]

# methods that keep something from step to step
KEPT = [
    "dice",
    *(pytest.param(m, marks=pytest.mark.variants) for m in ("ftrl, drawn again", "ftrl")),
]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        # whole, by block, autocast, vmap, by layer and scaled; and what keeps something, by three
        (2, [CASES[i] for i in (0, 1, 5, 6, 8, 10)]),
        (3, [CASES[3], CASES[11]]),
        pytest.param(2, CASES, marks=pytest.mark.variants),
        pytest.param(3, [*CASES[::2], *CASES[5::2]], marks=pytest.mark.variants),
    ],
)
def test_without_noise_sharded_models_train_as_in_one_process(
    size: int, cases: list[tuple[str, str, dict[str, Any]]]
) -> None:
    """Same coins, no noise, float32: whole, per block, with adapters, microbatches, autocast."""
    alone = work.without_noise(0, cases)
    for results in run_ranks(size, work.without_noise, cases):
        for case, result, expected in zip(cases, results, alone, strict=True):
            assert float((result - expected).abs().max()) < 1e-6, case


@pytest.mark.parametrize("size", [2, 3])
def test_whole_weights_are_known_to_be_what_the_run_left(size: int, tmp_path: Path) -> None:
    """One rank alone writes the certificate: what the others had left, it knows by digests."""
    found = run_ranks(size, work.certified, "per block", str(tmp_path))[0]
    assert found == {
        name: name in ("gathered", "wrapped")
        for name in ("gathered", "wrapped", "one number", "one less", "one more", "other kind")
    }


@pytest.mark.variants
def test_a_sharded_tensor_moves_as_far_by_adam_bc_as_a_whole_one() -> None:
    alone = work.by_adam_bc(0)
    for result in run_ranks(2, work.by_adam_bc):
        assert float((result - alone).abs().max()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("detector", ["noise", "sums", "shift", "reductions"])
def test_each_bug_is_noticed_and_the_code_as_it_is_is_not(detector: str) -> None:
    (expected,) = work.without_noise(0, [("flat", "per block", {"steps": 2})])
    for found in run_ranks(2, work.caught_mutants, detector, expected):
        assert not found.pop("none")
        assert found
        missed = [name for name, noticed in found.items() if not noticed]
        assert not missed


@pytest.mark.variants
@pytest.mark.slow
def test_an_audit_certifies_as_much_as_in_one_process() -> None:
    """With every canary on the last rank, and its row on any: see test_guarantee.py for the
    limit.
    """
    for bound, claimed, limit in run_ranks(2, work.audited):
        assert bound < claimed
        assert abs(bound - limit) < 0.2 * claimed


def test_between_steps_each_rank_holds_its_parts_alone() -> None:
    for seen in run_ranks(2, work.bytes_held):
        assert 0.4 * seen["all"] < seen["held"] < 0.65 * seen["all"]  # uneven rows
        assert seen["gathered"] == seen["odd gradients"] == 0
        assert seen["left"] > 0, "no gradient was looked at"
        assert 0 < seen["in attach"] < seen["all"]  # what the trial's passes leave: the root


def test_between_steps_no_rank_holds_sums() -> None:
    """One process keeps the memory of a table's sums, 5,000 x 8 entries in float64; ranks none."""
    assert work.sums_held(0) >= 320_000
    assert max(run_ranks(2, work.sums_held)) < 1_000


def test_where_layers_run_on_rounded_copies_a_record_moves_a_sum_by_the_bound_at_most() -> None:
    """MixedPrecisionPolicy(param_dtype=bfloat16), parameters in float32."""
    for shift in run_ranks(2, work.rounded_shift):
        assert 0.5 < shift <= 1.0


def test_what_cannot_be_done_is_refused_by_name() -> None:
    said = {
        "mean in bfloat16": "ran in bfloat16 or float16 with a loss that is a mean",
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


@pytest.mark.parametrize("method", KEPT)
def test_a_run_goes_on_in_shards_of_any_number_or_whole(method: str, tmp_path: Path) -> None:
    """Saved by two processes in shards, taken up by one without and by three; noise off. Saved by
    one, taken up by two.
    """
    path = str(tmp_path / "run")
    run_ranks(2, work.part_of_run, method, path, 0.0, True)
    expected = work.part_of_run(0, method, path, 0.0, False)["parameters"]
    for result in run_ranks(3, work.part_of_run, method, path, 0.0, False):
        assert float((result["parameters"] - expected).abs().max()) < 1e-6
    alone = str(tmp_path / "alone")
    work.part_of_run(0, method, alone, 0.0, True)
    for result in run_ranks(2, work.part_of_run, method, alone, 0.0, False):
        assert float((result["parameters"] - expected).abs().max()) < 1e-6


@pytest.mark.variants
def test_a_file_of_one_process_is_handed_on_tensor_by_tensor(tmp_path: Path) -> None:
    """In one message every rank would have it three times: as bytes, read, and in place."""
    path = str(tmp_path / "run")
    work.part_of_run(0, "ftrl", path, 0.0, True)
    assert max(run_ranks(2, work.largest_handed_on, path)) < 32


@pytest.mark.parametrize("method", KEPT)
def test_what_shards_keep_is_whole_in_the_file(method: str, tmp_path: Path) -> None:
    """Saved by two, taken up and saved by three: model, optimizer, noise to take back, error,
    batches ahead and reservation are the same.
    """
    path, again = str(tmp_path / "run"), str(tmp_path / "again")
    everyone = run_ranks(2, work.part_of_run, method, path, 0.5, True)
    everyone += run_ranks(3, work.part_of_run, method, path, 0.5, False, again)
    assert len({each["reservation"] for each in everyone}) == 1
    first, second = (as_lists(with_whole_tensors(file)) for file in (path, again))
    assert first.pop("identity") == second.pop("identity")
    assert len(first.pop("streams")) == 2  # of a seeded run; three have others
    assert len(second.pop("streams")) == 3
    assert first == second
    for file, size in ((path, 2), (again, 3)):
        parts = sorted(tmp_path.glob(f"{Path(file).name}.*.part"))
        assert [part.suffixes[-2] for part in parts] == [f".{r}-of-{size}" for r in range(size)]
        assert all(part.stat().st_mode & 0o777 == 0o600 for part in parts)


def test_a_save_that_fails_on_any_rank_loses_nothing_saved_before(tmp_path: Path) -> None:
    """A full disk on either rank, in a rank's own file or in the checkpoint itself, and a rank
    killed in the middle: the run goes on from the save before, in any number of processes.
    """
    path = str(tmp_path / "run")
    first, second = run_ranks(2, work.saves_that_fail, path)
    for case, own in (("rank 0's file", first), ("rank 1's file", second)):
        assert own[case].startswith("OSError: [Errno 28]"), case
    assert first["rank 1's file"].startswith("RankError: private.save: rank 1 could not write")
    assert second["rank 0's file"].startswith("RankError: private.save: rank 0 could not write")
    assert "Errno 28" in first["the checkpoint"]
    assert "Errno 28" in second["the checkpoint"]
    assert first["parts"] == second["parts"] == [2, 2, 2]  # nothing is left of what failed
    for moment, victim in (("writing", 1), ("written", 0)):
        heard = run_ranks(2, work.killed_in_save, path, moment)
        assert heard[victim] == "died"
        assert heard[1 - victim].startswith("RankError: ")
        assert f"rank {victim} gave no sign of life" in heard[1 - victim]
        steps = 2 if moment == "writing" else 3
        alone = work.goes_on_from(0, path)
        for found in run_ranks(victim + 2, work.goes_on_from, path):
            assert found["steps"] == steps
            assert float((found["parameters"] - alone["parameters"]).abs().max()) == 0


def test_a_seeded_run_that_was_resumed_is_the_one_without_interruption(tmp_path: Path) -> None:
    """On as many ranks, sharded (float32) and whole (float64): the same coins, and the same noise.
    Batches that were drawn ahead are dealt anew, so sums round in another order.
    """
    for far in run_ranks(2, work.seeded_runs, str(tmp_path / "run")):
        assert far[0] < 1e-6
        assert far[1] < 1e-12


def test_at_every_moment_of_a_save_the_files_are_a_whole_checkpoint(tmp_path: Path) -> None:
    """The one before, or the new one: whatever was copied whenever a rank touched a file."""
    (tmp_path / "copies").mkdir()
    path = str(tmp_path / "run")
    run_ranks(2, work.seen_while_saving, path, str(tmp_path / "copies"))
    copies = sorted((tmp_path / "copies").glob("*-*"))
    found = [work.goes_on_from(0, str(copy / "run"))["steps"] for copy in copies]
    # each rank puts its part in place, rank 0 the checkpoint, and both remove both older parts
    assert len(found) >= 2 * 5
    assert set(found) == {2, 3}


def test_a_rank_s_file_that_is_missing_changed_or_mixed_up_is_named(tmp_path: Path) -> None:
    """Also sealed, where no file shows what is in it, and only the key opens it."""
    path, secret = str(tmp_path / "run"), str(tmp_path / "secret")
    run_ranks(2, work.parts_of_runs, path, secret, KEY)
    alone = work.goes_on_from(0, path)["parameters"]
    sealed = work.goes_on_from(0, secret, KEY)["parameters"]
    assert float((alone - sealed).abs().max()) == 0
    weights = [four.numpy().tobytes() for four in alone.split(4) if four.all()]
    for name, shown in (("run", True), ("secret", False)):
        text = b"".join(part.read_bytes() for part in tmp_path.glob(f"{name}*"))
        assert any(four in text for four in weights) == shown
    for run, key in ((path, None), (secret, KEY)):
        first, part = sorted(tmp_path.glob(f"{Path(run).name}.*.part"))
        before = part.read_bytes()
        for other in (before[:-1] + bytes([before[-1] ^ 1]), first.read_bytes(), before[:-9], b""):
            part.write_bytes(other)
            with pytest.raises(ValueError, match="1-of-2.part is damaged"):
                work.goes_on_from(0, run, key)
        part.unlink()
        with pytest.raises(FileNotFoundError, match="1-of-2.part is missing"):
            work.goes_on_from(0, run, key)
        part.write_bytes(before)
        assert work.goes_on_from(0, run, key)["steps"] == 3
    with pytest.raises(ValueError, match="give the checkpoint_key"):
        work.goes_on_from(0, secret)


@pytest.mark.parametrize(
    ("where", "other"),
    [
        ("between steps", "KeyError: 'of rank 1 alone'"),
        pytest.param("in a forward pass", "KeyError: 'of rank 1 alone'", marks=pytest.mark.slow),
        pytest.param("killed in a forward pass", "died", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_or_dies_is_named_by_the_other(where: str, other: str) -> None:
    """Also where this one waits for it in a pass of the model, of which only FSDP knows."""
    first, second = run_ranks(2, work.one_fails, where)
    assert second == other
    assert first.startswith("RankError: ")
    assert "rank 1" in first
    assert ("gave no sign of life" in first) == where.startswith("killed")


def test_a_model_that_raises_on_a_rank_while_it_is_tried_ends_attach_on_all() -> None:
    """By an error that names the rank: gloo would abort one that began another pass. Where all
    raise, the model is as one that cannot be tried in one process.
    """
    first, second = run_ranks(2, work.raises_in_trial, [1], time_out=12.0)
    assert first.startswith("RankError: rank 0 lost the others")
    assert "rank 1 failed, and says why itself" in first
    assert second.startswith("RankError: rank 1 could not run the model on made-up records")
    assert "of these ranks alone" in second
    assert run_ranks(2, work.raises_in_trial, [0, 1]) == ["", ""]


# what PEFT asks of transformers
@pytest.mark.variants
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.slow
@pytest.mark.parametrize("way", ["tied", pytest.param("adapters", marks=pytest.mark.variants)])
def test_language_models_train_as_in_one_process(way: str) -> None:
    """Adapters of PEFT on a frozen GPT-2, and all of it, with the embedding tied to the head."""
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    alone = work.language(0, way)
    for parameters in run_ranks(2, work.language, way):
        assert float((parameters - alone).abs().max()) < 1e-6


# torch.compile's own look at it
@pytest.mark.variants
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.slow
def test_compiled_models_persons_and_several_optimizers_train_as_in_one_process() -> None:
    alone = work.other_ways(0)
    for results in run_ranks(2, work.other_ways):
        for way, parameters in results.items():
            assert float((parameters - alone[way]).abs().max()) < 1e-5, way


def test_the_run_is_reserved_before_a_sum_leaves_a_rank() -> None:
    for events in run_ranks(2, work.order_of_events):
        assert events[0] == "reserved"
        assert "not reserved" not in events
        assert events.count("sum") >= 2
