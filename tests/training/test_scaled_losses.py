"""Losses that a loop divides, as loops do that accumulate gradients."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim

N = 20
DATA = TensorDataset(
    torch.randn(N, 6, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 3
)


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def run(handed: Any, physical: int | None, *, noise_seed: int = 0, bare: bool = False) -> int:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(n=N, batch_size=N, steps=3, epsilon=3.0, delta=1e-3)
    with dpoptim.attach(
        plan, model, optimizer, DATA, loss=losses, noise_seed=noise_seed
    ) as private:
        for batch in private.batches(physical_batch_size=physical):
            value = handed(losses(model, batch), batch)
            value.backward() if bare else private.backward(value)
            optimizer.step()
    return private.steps_done


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.filterwarnings("ignore:the loss is a mean")
def test_a_number_that_one_microbatch_has_for_length_is_no_length(seed: int) -> None:
    """Five rows fit; records fall into four microbatches by chance, some of four."""
    assert run(lambda each, _: each.mean() / 4, 5, noise_seed=seed, bare=True) == 3


@pytest.mark.parametrize("physical", [None, 5])
@pytest.mark.filterwarnings("ignore:the loss is a mean")
def test_the_length_of_all_is_refused(physical: int | None) -> None:
    with pytest.raises(dpoptim.PrivacyError, match="another number in this|also the length"):
        run(lambda each, batch: each.mean() / len(batch[0]), physical)


@pytest.mark.parametrize(("divided", "physical"), [(4, 5), (4, None), (1, 5), (0.5, 5)])
def test_losses_that_are_divided_where_batches_are_cut_are_warned_of_once(
    divided: float, physical: int | None
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(lambda each, _: each / divided, physical)
    said = [each for each in caught if "divided by a whole number" in str(each.message)]
    assert len(said) == (divided == 4 and physical is not None)
    assert all(each.filename == __file__ for each in said)
