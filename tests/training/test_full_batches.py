"""Where every record is in every batch, a factor that is the batch's length never changes: it is
refused before the first release.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim

N, FEATURES, CLASSES = 9, 5, 3
X, Y = torch.randn(N, FEATURES), torch.arange(N) % CLASSES
Loss = Callable[[Tensor, Tensor], Tensor]

BY_LENGTH: dict[str, tuple[Loss, dict[str, Any]]] = {
    "a mean times it": (lambda s, y: F.cross_entropy(s, y) * len(y), {}),
    "a mean over it": (lambda s, y: F.cross_entropy(s, y) / len(y), {}),
    "its share": (lambda s, y: (1 / len(y)) * F.cross_entropy(s, y), {}),
    "one of several": (lambda s, y: 0.5 * F.cross_entropy(s, y) * len(y) / 4, {}),
    "a sum over it": (
        lambda s, y: F.cross_entropy(s, y, reduction="sum") / len(y),
        {"loss_reduction": "sum"},
    ),
}


def steps_done(loss: Loss, batch_size: int = N, **options: Any) -> int:
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=batch_size, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    data = TensorDataset(X, Y)
    with dpoptim.attach(plan, model, optimizer, data, noise_seed=1, **options) as private:
        try:
            for x, y in private.batches():
                private.backward(loss(model(x), y))
                optimizer.step()
        except dpoptim.PrivacyError as error:
            error.add_note(f"after {private.steps_done} steps")
            raise
    return private.steps_done


@pytest.mark.parametrize("name", BY_LENGTH)
def test_lengths_are_refused_before_a_release(name: str) -> None:
    loss, options = BY_LENGTH[name]
    with pytest.raises(dpoptim.PrivacyError, match="the length of this batch.*Fix") as raised:
        steps_done(loss, **options)
    assert raised.value.__notes__ == ["after 0 steps"]
    assert str(N) not in str(raised.value)


def test_other_factors_are_not() -> None:
    assert steps_done(lambda s, y: 0.5 * F.cross_entropy(s, y)) == 2
    assert steps_done(lambda s, y: F.cross_entropy(s, y, reduction="none")) == 2
    # batches of other lengths would show it
    assert steps_done(lambda s, y: F.cross_entropy(s, y) * 4, batch_size=4) == 2
