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
@pytest.mark.filterwarnings("ignore::dpoptim.OtherRunsWarning")  # methods are compared
def test_selected_rows_are_timed_and_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sparse_rows

    for name, small in (("VOCABULARY", 1000), ("RECORDS", 2000), ("CLICK_WORDS", 1000)):
        monkeypatch.setattr(sparse_rows, name, small)
    monkeypatch.setattr(sparse_rows, "EPOCHS", 1)
    assert [float(row["ms"]) > 0 for row in sparse_rows.times(2, skipped=0)] == [True] * 5
    for trial in (sparse_rows.Trial("plain", 0.0), sparse_rows.Trial("SparseSGD", 4.0, 0.5, 1e-2)):
        assert 0.4 < float(sparse_rows.learned(trial, 0)["auc"]) < 1


@pytest.mark.variants
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


@pytest.mark.set_aside("Llama-1B, LoRA", "ResNet, wide")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # torch's, of Opacus' hooks
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["GPT-2", pytest.param("ViT-B", marks=pytest.mark.variants), "Llama-1B, LoRA", "ResNet, wide"],
)
def test_each_batch_of_a_gpu_s_models_is_timed_by_every_variant_that_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny, on the CPU."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import mixed_precision as made

    monkeypatch.setattr(made, "WARM", 1)
    monkeypatch.setattr(made, "ROUNDS", 1)
    device = torch.device("cpu")
    works = made.workloads(name, tiny=True)
    rows = [row for work in works for row in made.measure(work, made.UNCOMPILED, device)]
    ours = ("plain", "ours", "ours, noise", "ours, graph")
    assert [row["variant"] for row in rows if row["variant"] not in made.PEERS] == [
        variant for _ in made.LARGE[name][1] for variant in ours
    ]
    assert all(float(str(row["milliseconds"])) > 0 for row in rows)
    table = made.page_table(rows).splitlines()
    assert len(table) == 2 + len(made.LARGE[name][1])


def test_the_page_has_the_table_of_the_committed_figures_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import mixed_precision
    import saving

    committed = BENCHMARKS.parent / "docs" / "speed.md"
    page = tmp_path / "speed.md"
    page.write_text(committed.read_text())
    table = mixed_precision.page_table(rows_of("mixed_precision_cuda.csv"))
    for _ in range(2):  # between the marks alone
        saving.write_between(page, {"accelerator": table}, "mixed_precision")
        assert page.read_text() == committed.read_text()


def test_noise_on_a_device_is_timed_by_every_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import noise_throughput as made

    device = torch.device("cpu")
    lines = made.measure_on(device, 1000, rounds=1)
    assert [line["what"] for line in lines] == list(made.contenders_on(device, 1000))
    assert all(float(str(line["milliseconds"])) > 0 for line in lines)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # of the whole process
    of_the_cpu = made.on_the_cpu(1000, rounds=1)
    assert [line["what"] for line in of_the_cpu] == list(made.contenders(1000, 1))


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
