"""Where records meet in a model is said: in which layer, or before which."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.training.trials.first_passes import OutputsMixedError

RECORDS, LENGTH, WIDTH = 40, 5, 8


class Tagger(nn.Module):
    """Reads words by a layer that takes records on its second axis, unless it is told otherwise."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(9, WIDTH), layer, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        read = self.layer(self.words(x))
        return self.head((read[0] if isinstance(read, tuple) else read)[:, -1])


class Centred(nn.Identity):
    """Subtracts the batch's mean before its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0))


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("checked", [True, False], ids=["with the loss", "without"])
@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.GRU(WIDTH, WIDTH), r"in layer 'layer' \(GRU\), which was built with batch_first=False"),
        (
            nn.TransformerEncoderLayer(WIDTH, 2, 8),
            r"in layer 'layer.self_attn' \(MultiheadAttention\), .* batch_first=False",
        ),
        (Centred(), r"before layer 'layer.inner' \(Linear\)\."),
    ],
)
def test_the_first_layer_that_mixes_is_named(layer: nn.Module, said: str, checked: bool) -> None:
    model, x = Tagger(layer), torch.randint(0, 9, (RECORDS, LENGTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=RECORDS, batch_size=10, steps=2, noise_multiplier=1.0, delta=1e-3
    )
    records = TensorDataset(x, torch.randint(0, 3, (RECORDS,)))
    with pytest.raises(dpoptim.SamplesInteractError, match=f"first {said}") as raised:
        dpoptim.attach(plan, model, optimizer, records, loss=losses if checked else None)
    assert isinstance(raised.value, OutputsMixedError) != checked


def test_nothing_is_said_of_what_no_layer_shows() -> None:
    class Returned(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            return found - found.mean(0)

    model = Returned(WIDTH, 3)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=RECORDS, batch_size=10, steps=2, noise_multiplier=1.0, delta=1e-3
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OutputsMixedError, match=r"outputs of others\. Usual causes") as raised:
        dpoptim.attach(plan, model, optimizer, TensorDataset(torch.randn(RECORDS, WIDTH)))
    assert not raised.value.where
