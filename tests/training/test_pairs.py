"""Models that return similarities of all pairs, as CLIP does: their records are mixed in what is
returned, and may be apart in the loss.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.training.trials.isolation import IsolationWarning

N, FEATURES = 8, 5
generator = torch.Generator().manual_seed(1)
IMAGES, TEXTS = torch.randn(2, N, FEATURES, generator=generator)
IMAGES[1] *= 20
DATA = TensorDataset(IMAGES, TEXTS)
Loss = Callable[[nn.Module, Any], Tensor]


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = F.normalize(self.images(images), dim=1), F.normalize(self.texts(texts), dim=1)
        return a, b, self.scale * a @ b.T


def own_pairs(model: nn.Module, batch: Any) -> Tensor:
    a, b, _ = model(*batch)
    return -F.logsigmoid((a * b).sum(1))


def all_pairs(model: nn.Module, batch: Any) -> Tensor:
    scores = model(*batch)[2]
    return F.cross_entropy(scores, torch.arange(len(scores)))


def released(loop: Loss, data: TensorDataset = DATA, **options: Any) -> tuple[Tensor, str]:
    torch.manual_seed(0)
    model, sums = TwoTowers(), list[Tensor]()
    model.scale.requires_grad_(options.pop("scale", False))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=1, noise_multiplier=0.0, delta=1e-5
    )

    def look(*step: Any) -> None:
        if all(p.grad is not None for p in trained):  # not between microbatches
            sums.append(torch.cat([p.grad.double().flatten() for p in trained]))

    with dpoptim.attach(plan, model, optimizer, data, **options) as private:
        optimizer.register_step_pre_hook(look)
        for batch in private.batches():
            private.backward(loop(model, batch))
            optimizer.step()
    return N * sums[0], " ".join(item.text for item in private.basis)


def test_a_loss_of_own_pairs_is_served_with_records_alone() -> None:
    with pytest.warns(IsolationWarning, match="the model returns mixtures of records"):
        whole, basis = released(own_pairs, loss=own_pairs)
    assert "every microbatch has one record" in basis
    less = TensorDataset(*(torch.cat([t[:1], t[2:]]) for t in (IMAGES, TEXTS)))
    with pytest.warns(IsolationWarning):
        other, _ = released(own_pairs, less, loss=own_pairs)
    assert 0.1 < float((whole - other).norm()) <= 1.0
    torch.testing.assert_close(whole, released(own_pairs, isolation="alone")[0])


@pytest.mark.parametrize("scale", [False, True])
def test_a_loss_of_all_pairs_is_refused(scale: bool) -> None:
    with pytest.raises(
        dpoptim.SamplesInteractError, match="records are mixed|compares the records of a batch"
    ):
        released(all_pairs, loss=all_pairs, scale=scale)
    with pytest.raises(dpoptim.SamplesInteractError, match=r"attach\(..., loss=loss\)"):
        released(all_pairs, scale=scale)
    with pytest.raises(dpoptim.SamplesInteractError, match=r"attach\(..., loss=loss\)"):
        released(own_pairs)


def test_rows_of_records_are_not_passed_alone() -> None:
    views = TensorDataset(IMAGES[:, None].expand(-1, 2, -1).clone(), TEXTS[:, None].repeat(1, 2, 1))
    with pytest.raises(
        dpoptim.SamplesInteractError, match="records are mixed|compares the records of a batch"
    ):
        released(own_pairs, views, loss=own_pairs, rows_per_record=2)


def test_means_of_mixed_records_are_told_for_parameters_without_an_axis() -> None:
    """The refusal had been lost in an IndexError of its own."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.tensor(2.0)), nn.Linear(FEATURES, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[:, 0] * self.scale

    def loss(model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0])
        return (scores - 0.5 * scores.mean()).square().mean()

    with pytest.raises(dpoptim.SamplesInteractError, match="records are mixed"):
        dpoptim.check(Scaled(), loss, (IMAGES, TEXTS))
