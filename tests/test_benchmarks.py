"""The benchmarks' private steps run: a variant that fails would only be missing from the table."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "ours", "ours, noise"])
@pytest.mark.parametrize("workload", ["softmax 785-10", "MLP 784-256-10"])
def test_a_step_runs(workload: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step_time
    from workloads import WORKLOADS

    step = step_time.VARIANTS[variant](WORKLOADS[workload])
    step()
    step()
