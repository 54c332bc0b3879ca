"""The benchmarks' private steps run: a variant that fails would only be missing from the table."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "ours", "ours, noise", "plain, loop", "ours, loop"])
@pytest.mark.parametrize("workload", ["softmax 785-10", "MLP 784-256-10"])
def test_a_step_runs(workload: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step_time
    from workloads import WORKLOADS

    step = step_time.COLUMNS[variant].make(WORKLOADS[workload])
    step()
    step()


@pytest.mark.slow
def test_loaders_are_compared_on_each_data_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import loader_speed

    for data, batch in loader_speed.data_sets(tmp_path, 10_000).values():
        assert loader_speed.compare(data, batch, workers=0, rounds=1, count=2)["ratio"] > 0
