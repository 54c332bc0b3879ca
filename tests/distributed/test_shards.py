"""Estimators fitted in several processes: the result, the charge and the errors of one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shard_work as work
from dpoptim.data import ParquetRows
from dpoptim.estimators import table
from ranks import TIME_OUT, run_ranks

CLOSED_FORM = [*work.SOLVERS, "sufficient-statistics", "huber"]
TABLES = ["weighted noisy-gd", "sparse noisy-gd", "sparse sufficient-statistics"]


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.variants)])
def test_shards_give_what_their_union_gives_one_process(size: int, tmp_path: Path) -> None:
    """Same noise seed: the same weights on all ranks, to 1e-6 those of one process; shards are
    memory maps, or sparse tables. With the whole table on every rank too.
    """
    kinds = [*CLOSED_FORM, *TABLES]
    alone = work.fits(0, kinds, False, "")
    for sharded in (True, False):
        everyone = run_ranks(size, work.fits, kinds, sharded, str(tmp_path))
        for kind in kinds:
            weights, epsilon = alone[kind]
            for found in everyone:
                np.testing.assert_allclose(found[kind][0], weights, rtol=1e-6, atol=1e-9)
                assert found[kind][1] == epsilon
                assert (found[kind][0] == everyone[0][kind][0]).all()


def test_a_choice_among_points_is_that_of_one_process() -> None:
    alone = work.selected(0)
    for found in run_ranks(2, work.selected):
        np.testing.assert_allclose(found, alone, rtol=1e-6)


@pytest.mark.set_aside("accelerated-srgd")
@pytest.mark.parametrize("kind", work.SINGLE_PASS)
def test_batches_of_a_single_pass_take_records_of_all_ranks(kind: str) -> None:
    order = work.dealt_order(2, 20, 30)
    alone = work.one_pass(0, kind, 30, order)
    for found in run_ranks(2, work.one_pass, kind, 30, None):
        np.testing.assert_allclose(found, alone, rtol=1e-6)


def test_row_groups_are_dealt_out_and_give_what_all_give_one_process(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    paths, names = written(tmp_path)
    alone, rows = work.parquet(0, paths, names)
    assert rows == work.ROWS
    everyone = run_ranks(2, work.parquet, paths, names)
    assert sum(rows for _, rows in everyone) == work.ROWS
    for found, _ in everyone:
        np.testing.assert_allclose(found, alone, rtol=1e-6)


def written(folder: Path) -> tuple[list[str], list[str]]:
    """The table in two files of small row groups."""
    import pyarrow as pa
    from pyarrow import parquet

    x, labels, _ = work.table()
    names = [f"x{j}" for j in range(work.FEATURES)]
    paths = []
    for number, part in enumerate((slice(0, 350), slice(350, None))):
        columns = dict(zip(names, x[part].T, strict=True)) | {"label": labels[part]}
        paths.append(str(folder / f"{number}.parquet"))
        parquet.write_table(pa.table(columns), paths[-1], row_group_size=90)
    return paths, names


def test_blocks_of_parquet_files_are_rows_of_the_whole(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    paths, names = written(tmp_path)
    rows = ParquetRows(paths, names, dtype=np.float64)
    x, labels, _ = work.table()
    assert rows.shape == x.shape
    for start, stop in ((0, 600), (80, 100), (349, 351), (595, 999), (10, 10)):
        assert (rows[start:stop] == x[start:stop]).all()
        assert (rows.rows(start, stop)[2:9] == x[start:stop][2:9]).all()
        assert (rows.rows(start, stop).column("label") == labels[start:stop]).all()
    with pytest.raises(ValueError, match="has no column 'x9'; it has x0, x1"):
        ParquetRows(paths, ["x9"])
    with pytest.raises(ValueError, match="'label' of .* holds no numbers"):
        ParquetRows(paths, ["label"])
    with pytest.raises(ValueError, match="has no row group"):
        ParquetRows(paths, names, part=(8, 9))


def test_a_memory_map_is_never_in_memory_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows there are, no more than a block of them is read at a time; the same as
    from an array.
    """
    most, honest = [0], table.clip_rows

    def counted(x: Any, norm: float, dtype: Any = None) -> Any:
        most[0] = max(most[0], len(x))
        return honest(x, norm, dtype)

    monkeypatch.setattr(table, "clip_rows", counted)
    x, labels, targets = work.table(30_000)
    np.save(tmp_path / "x.npy", x)
    for kind in ("momentum-gd", "sufficient-statistics", "one-pass-sgd"):
        most[0] = 0
        fit = work.estimator(kind)
        y = targets if hasattr(fit, "loss") else labels
        fit.fit(np.load(tmp_path / "x.npy", mmap_mode="r"), y)
        assert 0 < most[0] <= 8192
        again = work.estimator(kind).fit(x, y)
        assert most[0] == 30_000
        np.testing.assert_allclose(work.fitted(fit), work.fitted(again), rtol=1e-9)


def test_rank_0_reserves_once_before_a_sum_travels(tmp_path: Path) -> None:
    everyone = run_ranks(2, work.charged, str(tmp_path / "ledger.sqlite"))
    assert [state for state, _ in everyone[0]["entries"]] == ["committed"]
    for each in everyone:
        assert each["seen"] == [1] * 5
        assert each["second"].startswith("BudgetExceeded: ")
        assert each["second"] == everyone[0]["second"]
        assert each["privacy"] == everyone[0]["privacy"]
        assert any("no record is in the tables of two" in note for note in each["privacy"].notes)


def test_a_release_that_each_rank_would_make_anew_is_charged_once_or_refused(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(2, work.charging, str(tmp_path / "ledger.sqlite"))
    assert first["charges"] == second["charges"] == 3
    for case in ("scaler", "quantiles", "evaluation"):
        assert first[case] == ""
        assert "on rank 1: each rank would draw noise, and charge" in second[case], case


def test_pipelines_and_searches_are_charged_once_and_learn_what_one_process_does(
    tmp_path: Path,
) -> None:
    """The trials of a search are divided up; which one wins, and its model, are as in one: bit by
    bit, with the same seeds.
    """
    (alone,) = run_ranks(1, work.together, str(tmp_path / "alone.sqlite"), group=False)
    everyone = run_ranks(2, work.together, str(tmp_path / "ledger.sqlite"))
    assert len(alone["entries"]) == 2  # pipeline, search
    assert everyone[0]["entries"] == alone["entries"]
    for each in everyone:
        for name in ("pipeline", "search"):
            for found, known in zip(each[name], alone[name], strict=True):
                np.testing.assert_array_equal(found, known)
            assert each[f"{name}'s"] == everyone[0][f"{name}'s"]
            assert each[f"{name}'s"].epsilon == alone[f"{name}'s"].epsilon
            assert any("2 processes" in note for note in each[f"{name}'s"].notes)
        assert each["own step"]
        assert each["refused"]["sharded"].startswith(
            "ValueError: sharded=True: DPSearchCV trains more than"
        )
        for case, name in (("differ", "data set"), ("persons", "persons")):
            said = f"rank 1 would not go on with the same {name} as rank 0"
            assert said in each["refused"][case]
    first, second = (each["tried"] for each in everyone)
    assert second  # the seed has several trials
    assert sorted(first + second) == sorted(alone["tried"])
    assert 0 <= len(first) - len(second) <= 1


def test_ranks_that_differ_or_fail_are_named_on_all() -> None:
    first, second = run_ranks(2, work.differing)
    other = "RankError: rank 1 would not go on with the same {} as"
    for case, name in {
        "epsilon": "epsilon",
        "columns": "number of columns",
        "classes": "classes",
        "data": "data set",
        "weights": "kind of sample_weight (given or None)",
        "shards taken for the whole": "data set",
    }.items():
        assert first[case].startswith(other.format(name)), case
        assert second[case] == first[case]
    case = "the whole taken for shards"
    assert "ranks 0 and 1 have the same records" in first[case]
    assert second[case] == first[case]
    for case, own in {
        "broken table": "ValueError: Input X contains NaN",
        "undeclared": "ValueError: y has a label that is none",
    }.items():
        assert first[case].startswith("RankError: rank 1 failed in fit"), case
        assert second[case].startswith(own), case
    assert "rank 1 left it with an error" in first["in a sum"]
    assert second["in a sum"] == "OSError: of rank 1 alone"
    assert first["statistics"] == second["statistics"]
    assert first["works after all that"] == second["works after all that"] == "(15,)"


def test_a_rank_killed_in_a_sum_is_named_in_time() -> None:
    first, second, third = run_ranks(3, work.dies, "killed")
    assert third == "died"
    for said, seconds in (first, second):
        assert said.startswith("RankError: ")
        assert "rank 2 gave no sign of life" in said
        assert "The time-out is 0:05:00" in said
        assert seconds < TIME_OUT


@pytest.mark.slow
def test_each_bug_is_noticed_and_the_code_as_it_is_is_not(tmp_path: Path) -> None:
    alone = work.fitted(work.estimator("momentum-gd").fit(*work.table()[:2]))
    for found in run_ranks(2, work.caught_mutants, alone, str(tmp_path)):
        assert not found.pop("none")
        missed = [name for name, noticed in found.items() if not noticed]
        assert not missed


def test_one_process_needs_no_group() -> None:
    x, labels, _ = work.table()
    notes = work.estimator("noisy-gd", sharded=True).fit(x, labels).privacy_.notes
    assert not any("processes" in note for note in notes)
