"""The benchmarks' private steps run: a variant that fails would only be missing from the table."""

from pathlib import Path

import pytest
import torch

from committed import BENCHMARKS, rows_of


@pytest.mark.slow
@pytest.mark.parametrize("column", ["plain", "ours", "ours, noise"])
@pytest.mark.parametrize("workload", ["softmax 785-10", "MLP 784-256-10"])
def test_a_step_runs(workload: str, column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step_time
    from workloads import WORKLOADS

    step = step_time.COLUMNS[column].make(WORKLOADS[workload])
    step()
    step()


@pytest.mark.figures
def test_loaders_are_compared_on_each_data_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import loader_speed

    for data, batch in loader_speed.data_sets(tmp_path, 10_000).values():
        assert loader_speed.compare(data, batch, workers=0, rounds=1, count=2)["ratio"] > 0


@pytest.mark.slow
def test_selected_rows_are_timed_and_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sparse_rows

    for name, small in (("VOCABULARY", 1000), ("RECORDS", 2000), ("CLICK_WORDS", 1000)):
        monkeypatch.setattr(sparse_rows, name, small)
    monkeypatch.setattr(sparse_rows, "EPOCHS", 1)
    assert [float(row["ms"]) > 0 for row in sparse_rows.times(2, skipped=0)] == [True] * 5
    for trial in (sparse_rows.Trial("plain", 0.0), sparse_rows.Trial("SparseSGD", 4.0, 0.5, 1e-2)):
        assert 0.4 < float(sparse_rows.learned(trial, 0)["auc"]) < 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while tracing
def test_compiled_graphs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """None for an `nn.Sequential`, whose hooks would be compiled with it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import compiled_graphs
    from workloads import WORKLOADS

    found = list(compiled_graphs.counted(WORKLOADS["MLP 784-256-10"]))
    assert [graphs for _, graphs, _ in found] == [0] * 5
    assert found[-1][2] >= found[0][2] > 0
    torch.compiler.reset()


def test_the_guide_has_the_tables_of_the_committed_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import distributed_model

    guide = tmp_path / "guide.md"
    guide.write_text(distributed_model.GUIDE.read_text())
    for _ in range(2):  # between the marks alone
        distributed_model.write_tables(rows_of("distributed.csv"), guide)
        assert guide.read_text() == distributed_model.GUIDE.read_text()


@pytest.mark.figures
def test_private_and_plain_steps_in_two_processes_make_the_guide_s_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import distributed
    import distributed_model

    row = distributed.row_of("softmax 785-10", distributed.measure("softmax 785-10", 1))
    row |= distributed.memory_columns("softmax 785-10")
    for kind in ("one", "DDP", "FSDP2"):
        assert float(row[f"private over plain, {kind}"]) > 0, row["missing"]
    assert 5.9 < float(row["bytes, DDP"]) / float(row["parameters"]) < 6.1  # 8/2 and 4/2
    models = distributed_model.modelled(row)
    assert [line["ranks"] for line in models[:6]] == [2, 8, 32, 128, 512, 1000]
    guide = tmp_path / "guide.md"
    guide.write_text(distributed_model.GUIDE.read_text())
    distributed_model.write_tables([row], guide)
    assert "| private, DDP, ms (of plain) |" in guide.read_text()
