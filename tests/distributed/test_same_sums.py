"""However many processes train: the sums are those of one."""

import pytest
import torch

import distributed_work as work
from ranks import run_ranks

METHODS, WAYS = list(work.METHODS), list(work.WAYS)


@pytest.fixture(scope="module")
def alone() -> dict:
    return work.without_noise(0, METHODS, ["bare", "in a ball"])


@pytest.mark.parametrize(
    ("size", "methods", "ways"),
    [
        (2, METHODS[::2], ["microbatches", "in a ball"]),
        (3, METHODS[1::2], WAYS[1::2]),
        pytest.param(2, METHODS[1::2], WAYS, marks=pytest.mark.variants),
        pytest.param(3, METHODS, WAYS, marks=pytest.mark.variants),
        pytest.param(2, METHODS[::2], WAYS, marks=pytest.mark.variants),
    ],
)
def test_without_noise_any_number_of_ranks_trains_the_same_model(
    size: int, methods: list[str], ways: list[str], alone: dict
) -> None:
    """Same coins, no noise: every method, bare and wrapped, whole and in microbatches, with one
    optimizer and several.
    """
    everyone = run_ranks(size, work.without_noise, methods, ways)
    for results in everyone:
        for (method, way), result in results.items():
            expected = alone.get((method, way)) or alone[method, "bare"]
            torch.testing.assert_close(
                result["parameters"],
                expected["parameters"],
                rtol=1e-12,
                atol=1e-12,
                msg=lambda m, k=(method, way): f"{k}: {m}",
            )
            assert result["clip_norm"] == pytest.approx(expected["clip_norm"], rel=1e-12)
            # the same bits everywhere
            assert torch.equal(result["parameters"], everyone[0][method, way]["parameters"])


# torch.compile's own look at it
@pytest.mark.variants
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_adapters_autocast_compiled_models_and_persons_train_as_in_one_process() -> None:
    alone = work.other_ways(0)
    for results in run_ranks(2, work.other_ways):
        for way, parameters in results.items():
            difference = float((parameters - alone[way]).abs().max())
            assert difference < (2e-2 if way == "autocast" else 1e-5), (way, difference)
