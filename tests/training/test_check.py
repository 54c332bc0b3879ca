"""`check` and the probe find mixed records, and tell a mean from a sum."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dpoptim
from dpoptim.gradients.isolation import Isolation
from dpoptim.training.trials import isolation
from dpoptim.training.trials.isolation import choose_isolation
from support import CASES, Positions, TiedHead, mean_cross_entropy


def batch(rows: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 5), torch.randint(0, 3, (rows,))


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 3))


def test_the_reduction_is_found() -> None:
    model = classifier()
    assert dpoptim.check(model, mean_cross_entropy, batch()).loss_reduction == "mean"
    summed = dpoptim.check(
        model, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), batch()
    )
    assert summed.loss_reduction == "sum"


def test_nothing_about_the_model_changes() -> None:
    model = classifier().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    records = batch()
    random_before = torch.get_rng_state()
    dpoptim.check(model, mean_cross_entropy, records)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_before)


class Centred(nn.Module):
    """Subtracts the batch's mean: batch normalisation by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def contrastive(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
    z = F.normalize(model(b[0]), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


def token_mean(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
    """The usual language-model loss: a mean over the tokens of the whole batch, of which some are
    ignored.
    """
    return F.cross_entropy(model(b[0]).flatten(0, 1), b[1].flatten(), ignore_index=-100)


def record_token_mean(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
    losses = F.cross_entropy(model(b[0]).transpose(1, 2), b[1], ignore_index=-100, reduction="none")
    return dpoptim.losses.per_sample_mean(losses, b[1] != -100).mean()


def test_batch_statistics_are_found() -> None:
    model = nn.Sequential(nn.Linear(5, 7), Centred(), nn.Linear(7, 3))
    with pytest.raises(dpoptim.SamplesInteractError, match="records are mixed"):
        dpoptim.check(model, mean_cross_entropy, batch())


def test_a_contrastive_loss_is_found() -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match="contrastive"):
        dpoptim.check(classifier(), contrastive, batch())


def test_a_mean_over_the_tokens_of_the_batch_is_found() -> None:
    """By hand; of torch's own, each record's mean is taken."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (4, 5))
    labels = tokens.clone()
    labels[0, 1:] = -100  # records of different length
    labels[2, 3:] = -100

    def by_hand(model: Any, batch: Any) -> Tensor:
        counted = batch[1] != -100
        each = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
        return (each * counted).sum() / counted.sum()

    with pytest.raises(
        dpoptim.SamplesInteractError,
        match="weighted mean over the records.*tokens of the whole batch.*per_sample_mean",
    ):
        dpoptim.check(TiedHead(), by_hand, (tokens, labels))
    losses = token_mean, record_token_mean
    found = [dpoptim.check(TiedHead(), loss, (tokens, labels)) for loss in losses]
    assert [(each.loss_reduction, each.labels) for each in found] == [("mean", 5), ("mean", 0)]


def test_class_weights_inside_a_mean_are_found_where_they_are_not_undone() -> None:
    """`attach` and `backward` undo what torch divides by, where a graph shows it."""
    weights = torch.tensor([1.0, 5.0, 0.2])

    def torchs(m: Any, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0]), b[1], weight=weights)

    with pytest.raises(dpoptim.SamplesInteractError, match="class weights in"):
        dpoptim.check(classifier(), lambda m, b: torchs(m, b).exp().log(), batch())

    def weighted(m: Any, b: Any) -> Tensor:
        return (weights[b[1]] * F.cross_entropy(m(b[0]), b[1], reduction="none")).mean()

    found = [dpoptim.check(classifier(), loss, batch()) for loss in (torchs, weighted)]
    assert [each.loss_reduction for each in found] == ["mean", "mean"]
    assert [each.labels for each in found] == [1, 0]


def test_batches_without_a_common_first_axis_are_refused() -> None:
    with pytest.raises(ValueError, match="one common first axis"):
        dpoptim.check(
            classifier(), mean_cross_entropy, (torch.randn(4, 5), torch.zeros(3, dtype=torch.long))
        )
    with pytest.raises(ValueError, match="at least 2 records"):
        dpoptim.check(
            classifier(), mean_cross_entropy, (torch.randn(1, 5), torch.zeros(1, dtype=torch.long))
        )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_probe_passes_every_supported_layer(case: object) -> None:
    torch.manual_seed(0)
    x, target = case.inputs(4, torch.float32)  # type: ignore[attr-defined]
    chosen = choose_isolation(case.build(), TensorDataset(x, target))  # type: ignore[attr-defined]
    assert chosen.isolation == Isolation()
    assert not chosen.message
    assert "it did on random inputs" in chosen.basis[0].text


def test_the_probe_refuses_a_model_that_mixes_records() -> None:
    model = nn.Sequential(nn.Linear(5, 7), Centred(), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=6, batch_size=2, steps=1, noise_multiplier=1.0, delta=1e-5
    )
    with pytest.raises(dpoptim.SamplesInteractError):
        dpoptim.attach(plan, model, optimizer, TensorDataset(*batch()))


class BarePositions(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.token(x) + self.position(torch.arange(x.shape[1])))


def test_the_probe_finds_positions_that_could_pass_for_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With T positions and T records in a batch, nothing but the probe could tell them apart."""
    data = TensorDataset(torch.zeros(6, 6, dtype=torch.long))
    told = Isolation(shared=frozenset({"position"}), windows=True)
    assert choose_isolation(BarePositions(), data).isolation == told
    assert choose_isolation(BarePositions(), data, "rules").isolation == told
    monkeypatch.setattr(isolation, "places_of_records", lambda model, sample, way, **told: way)
    with pytest.raises(dpoptim.PrivacyError, match="'position'"):
        choose_isolation(BarePositions(), data, "rules")


def test_what_cannot_be_probed_is_taken_on_trust_and_says_why() -> None:
    class Words(Dataset[str]):
        def __getitem__(self, index: int) -> str:
            return "a secret"

    (basis,) = choose_isolation(classifier(), Words()).basis
    assert basis.kind == "trusted"
    assert "not made of tensors" in basis.text
    assert "secret" not in basis.text
    (wrong,) = choose_isolation(classifier(), TensorDataset(torch.randn(4, 99))).basis
    assert wrong.kind == "trusted"
    assert "RuntimeError" in wrong.text


class MixesInTraining(nn.Module):
    """Mixes records in training mode only, by as little as asked."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return x - self.share * x.mean(0) if self.training else x


@pytest.mark.parametrize("share", [1.0, 3e-4])
def test_mixing_in_training_mode_is_found(share: float) -> None:
    model = nn.Sequential(nn.Linear(5, 7), MixesInTraining(share), nn.Dropout(0.1), nn.Linear(7, 3))
    with pytest.raises(dpoptim.SamplesInteractError):
        choose_isolation(model, TensorDataset(*batch()))


def test_batch_normalisation_is_found_by_check_and_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7, affine=False), nn.Linear(7, 3))
    before = model[1].running_mean.clone()
    with pytest.raises(dpoptim.PrivacyError, match="BatchNorm1d"):
        dpoptim.check(model, mean_cross_entropy, batch())
    assert torch.equal(model[1].running_mean, before)


def test_the_probe_never_shows_a_record_to_the_model() -> None:
    """Only shape and dtype of record 0 matter: with the same random numbers, other values give the
    very same inputs.
    """

    class Recorder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.detach().clone())
            return x

    runs = []
    for value in (1.0, float("nan"), 1e30):
        seen: list[Tensor] = []
        torch.manual_seed(0)
        data = TensorDataset(torch.full((4, 5), value))
        (basis,) = choose_isolation(nn.Sequential(Recorder(), nn.Linear(5, 3)), data).basis
        assert "it did on random inputs" in basis.text
        runs.append(seen)
    for other in runs[1:]:
        assert len(other) == len(runs[0])
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_every_record_of_the_batch_is_compared() -> None:
    """Class weights inside a mean show only where both classes are among the compared records."""
    weights = torch.tensor([1.0, 1000.0])

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weights).exp().log()

    x = torch.randn(8, 5)
    for labels in ([0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1]):
        with pytest.raises(dpoptim.SamplesInteractError, match="class weights in"):
            dpoptim.check(nn.Linear(5, 2), loss, (x, torch.tensor(labels)))
    assert (
        dpoptim.check(
            nn.Linear(5, 2), lambda m, b: F.cross_entropy(m(b[0]), b[1]), (x, x[:, 0].long() * 0)
        ).records
        >= 8
    )


@pytest.mark.filterwarnings("ignore:std:UserWarning")
def test_statistics_that_need_several_records_are_found() -> None:
    """An unbiased variance of one record is not a number."""

    class Standardised(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(0)) / x.std(0)

    model = nn.Sequential(nn.Linear(5, 4), Standardised(), nn.Linear(4, 3))
    with pytest.raises(
        dpoptim.SamplesInteractError, match="no record by itself has a finite gradient"
    ):
        dpoptim.check(model, mean_cross_entropy, batch())
