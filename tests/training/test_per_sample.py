"""`dpoptim.per_sample`: any loss of a batch, taken of each record by itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.errors import PrivacyError, SamplesInteractError
from mutants.faults_of_isolation import others_rows_in_losses
from released_sums import sum_of_one_step

N, LENGTH, WIDTH = 9, 5, 3
generator = torch.Generator().manual_seed(0)
X = torch.randn(N, LENGTH, WIDTH, generator=generator)
Y = torch.randn(N, LENGTH, generator=generator)
COUNTS = torch.tensor([1, 5, 3, 5, 2, 4, 5, 1, 2])
MASKS = (torch.arange(LENGTH) < COUNTS[:, None]).float()
DATA = TensorDataset(X, Y, MASKS)
Loss = Callable[[Any, Any], Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(1))


def masked_by_hand(model: Any, batch: Any) -> Tensor:
    x, y, mask = batch
    return ((model(x) - y).square() * mask).sum() / mask.sum()


def picked(model: Any, batch: Any) -> Tensor:
    x, y, mask = batch
    return (model(x) - y)[mask.bool()].abs().mean()


def rooted(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1]).sqrt()


def dice(model: Any, batch: Any) -> Tensor:
    there, mask = model(batch[0]).sigmoid(), batch[2]
    return 1 - 2 * (there * mask).sum() / (there.sum() + mask.sum())


def largest(model: Any, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).abs().flatten().topk(2).values.mean()


def standardised(model: Any, batch: Any) -> Tensor:
    errors = model(batch[0]) - batch[1]
    return ((errors - errors.mean()) / (errors.std() + 0.1)).pow(3).mean() + errors.square().mean()


def correlation(model: Any, batch: Any) -> Tensor:
    return 1 - F.cosine_similarity(model(batch[0]).flatten(), batch[1].flatten(), dim=0)


def read_out(model: Any, batch: Any) -> Tensor:
    errors = (model(batch[0]) - batch[1]).square()
    return errors.mean() if float(batch[2].sum()) > 3 else errors.sum()


def two_calls(model: Any, batch: Any) -> Tensor:
    x, y, mask = batch
    near = model(x + 0.1 * torch.ones_like(x))
    return ((model(x) - near).square() * mask).sum() / mask.sum() + F.l1_loss(near, y).sqrt()


LOSSES = [
    *(masked_by_hand, picked, rooted, dice, largest, standardised, correlation, read_out),
    two_calls,
]


def released(
    loop: Loss,
    keep: Sequence[int] = range(N),
    *,
    clip_norm: float = 1e4,
    model: nn.Module | None = None,
    cut: int | None = None,
    tried: bool = True,
) -> Tensor:
    """The sum of one step, without noise; the loss ``tried`` when it is attached, if not before."""
    return sum_of_one_step(
        network() if model is None else model,
        torch.utils.data.Subset(DATA, [*keep]),
        loop,
        n=N,
        clip_norm=clip_norm,
        batches={"physical_batch_size": cut},
        loss=loop if tried else None,
    )


def one_by_one(loss: Loss, model: nn.Module | None = None) -> Tensor:
    """The gradients of the loss of each record in a batch of its own, added up."""
    model = network() if model is None else model
    parameters = [*model.parameters()]
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for i in range(N):
        own = loss(model, (X[i : i + 1], Y[i : i + 1], MASKS[i : i + 1]))
        found = torch.autograd.grad(own, parameters, materialize_grads=True)
        total += torch.cat([g.double().flatten() for g in found])
    return total


EACH = {loss: dpoptim.per_sample(loss) for loss in LOSSES}


@pytest.mark.one_in(2, first=1)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("tried_once_a_file")
def test_each_record_has_the_gradient_of_its_own_batch(loss: Loss) -> None:
    each, expected = EACH[loss], one_by_one(loss)
    for cut in (None, 4):
        found = released(each, cut=cut, tried=cut is None)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [masked_by_hand, dice, standardised])
def test_as_they_are_these_losses_are_refused(loss: Loss) -> None:
    with pytest.raises(SamplesInteractError, match=r"dpoptim\.per_sample\(loss\)"):
        released(loss)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("tried_once_a_file")
def test_no_record_moves_the_sum_by_more_than_the_clip_norm(loss: Loss) -> None:
    bound, each = 1e-3, EACH[loss]
    whole = released(each, clip_norm=bound)
    for left_out in (0, 1, N - 1):
        some = [i for i in range(N) if i != left_out]
        less = released(each, some, clip_norm=bound, tried=False)
        assert 0 < float((whole - less).norm()) <= bound


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(LOSSES),
    st.integers(0, N - 1),
    st.floats(-1e6, 1e6),
    st.sampled_from([0.0, 1.0, 1e3, -1e3]),
)
def test_a_record_moves_nobody_elses_loss(
    loss: Loss, place: int, number: float, flag: float
) -> None:
    each, model = dpoptim.per_sample(loss), network()
    other = [v.clone() for v in (X, Y, MASKS)]
    other[0][place], other[1][place], other[2][place] = number, -number, flag
    before, after = each(model, (X, Y, MASKS)), each(model, tuple(other))
    rest = [i for i in range(N) if i != place]
    torch.testing.assert_close(before[rest], after[rest], rtol=1e-5, atol=1e-6)


def test_the_attack_sees_the_rows_of_others() -> None:
    model, x = network(), X.clone()
    x[0] = 100.0
    with others_rows_in_losses():
        each = dpoptim.per_sample(rooted)
        before, after = each(model, (X, Y, MASKS)), each(model, (x, Y, MASKS))
    assert not torch.allclose(before[1:], after[1:])


def test_inputs_one_after_the_other() -> None:
    """Each record has its row in both halves."""

    def apart(model: Any, batch: Any) -> Tensor:
        a, b = model(batch[0]), model(-batch[0])
        return (a - b).abs().max() + (a * batch[2]).sum() / batch[2].sum()

    def joined(model: Any, batch: Any) -> Tensor:
        a, b = model(torch.cat((batch[0], -batch[0]))).chunk(2)
        return (a - b).abs().max() + (a * batch[2]).sum() / batch[2].sum()

    batch, model = (X, Y, MASKS), network()
    expected = torch.stack([apart(model, (X[i : i + 1], Y, MASKS[i : i + 1])) for i in range(N)])
    torch.testing.assert_close(dpoptim.per_sample(joined)(model, batch), expected)
    torch.testing.assert_close(dpoptim.per_sample(apart)(model, batch), expected)


@dataclass
class Returned:
    first: Tensor
    more: tuple[Tensor, dict[str, Tensor]]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Returned:
        found = self.layer(x).squeeze(-1)
        return Returned(found, (2 * found, {"three": 3 * found}))


def test_forms_of_batches_and_returns() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        found = model(batch["x"])
        assert len(batch["boxes"]) == len(batch["texts"]) == len(found.first)
        boxes = batch["boxes"][0]["box"]
        extra = found.more[1]["three"].sum() * boxes.mean() * len(batch["texts"][0])
        return model.scale * found.first.square().mean().sqrt() + found.more[0].max() + extra

    boxes: list[Any] = [{"name": str(i), "box": torch.full((i + 1, 2), 1.0 * i)} for i in range(N)]
    batch = {"x": X, "boxes": boxes, "texts": ["a" * (i + 1) for i in range(N)]}
    torch.manual_seed(0)
    model = Nested()
    each = dpoptim.per_sample(loss)(model, batch)
    for i in range(N):
        own = {"x": X[i : i + 1], "boxes": boxes[i : i + 1], "texts": batch["texts"][i : i + 1]}
        torch.testing.assert_close(each[i], loss(model, own))


def drawn_before(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0] + torch.randn_like(batch[0])), batch[1]).sqrt()


def standardised_inputs(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0] - batch[0].mean(0)), batch[1])


def mixed_inputs(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model((batch[0] + batch[0].flip(0)) / 2), batch[1])


def more_calls(model: Any, batch: Any) -> Tensor:
    found = model(batch[0])
    return found.sum() if len(found) > 1 else model(batch[0]).sum() + found.sum()


def fewer_calls(model: Any, batch: Any) -> Tensor:
    found = model(batch[0])
    return found.sum() if len(found) == 1 else model(batch[0]).sum() + found.sum()


def calls_in_a_chain(model: Any, batch: Any) -> Tensor:
    hidden = model[1](model[0](batch[0]))
    return (model[2](hidden - hidden.mean(0))[..., 0] - batch[1]).square().mean()


def calls_a_method(model: Any, batch: Any) -> Tensor:
    return masked_by_hand(model, batch) + model.extra_repr()


def reads_others(model: Any, batch: Any) -> Tensor:
    return masked_by_hand(model, batch) + OTHER


OTHER = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (drawn_before, "the same for a record"),
        (standardised_inputs, "the same for a record"),
        (mixed_inputs, "the same for a record"),
        (more_calls, "the same for a record"),
        (fewer_calls, "the same for a record"),
        (calls_in_a_chain, "has gradients"),
        (calls_a_method, "reads extra_repr"),
        (lambda model, batch: batch[1].mean(), "calls the model"),
    ],
)
def test_other_dealings_with_the_model_are_refused(loss: Loss, said: str) -> None:
    with pytest.raises(PrivacyError, match=said):
        dpoptim.per_sample(loss)(network(), (X, Y, MASKS))


class Weighted(nn.Module):
    """Two heads, weights of their tasks, and a catalogue."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(WIDTH, 4)
        self.one, self.two = nn.Linear(4, 1), nn.Linear(4, 1)
        self.scales = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.catalogue = nn.Embedding(6, 4)
        self.register_buffer("before", torch.full((4, WIDTH), 0.1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.one(hidden)[..., 0], self.two(hidden)[..., 0], hidden.mean(1)


def weighted_tasks(model: Any, batch: Any) -> Tensor:
    one, two, _ = model(batch[0])
    first = ((one - batch[1]).square() * batch[2]).sum() / batch[2].sum()
    scales = model.scales
    return (scales.neg().exp() * torch.stack([first, two.square().mean()]) + scales).sum()


def penalties(model: Any, batch: Any) -> Tensor:
    size = sum(p.abs().sum() for p in model.parameters())
    moved = sum(
        (p - model.before).square().sum() for k, p in model.named_parameters() if k == "body.weight"
    )
    return weighted_tasks(model, batch) + 0.1 * size + 0.5 * moved


def whole_catalogue(model: Any, batch: Any) -> Tensor:
    scores = model(batch[0])[2] @ model.catalogue.weight.T
    return F.cross_entropy(scores, batch[2].sum(1).long())


def catalogue_beside_lookups(model: Any, batch: Any) -> Tensor:
    items = model.catalogue(batch[2].sum(1).long())
    positive = (model(batch[0])[2] * items).sum(-1)
    return (model.catalogue.weight.square().sum() - positive).square().mean().sqrt()


READING = [weighted_tasks, penalties, whole_catalogue, catalogue_beside_lookups]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loss", READING)
def test_parameters_that_a_loss_reads(loss: Loss) -> None:
    """Each record's gradient by them is its own, and one with that by the model."""
    for cut in (None, 4):
        tried = cut is None
        found = released(dpoptim.per_sample(loss), model=Weighted(), cut=cut, tried=tried)
        torch.testing.assert_close(found, one_by_one(loss, Weighted()), rtol=1e-4, atol=1e-5)


@pytest.mark.one_in(2, first=1)
@pytest.mark.parametrize("loss", READING)
def test_parameters_that_a_loss_reads_are_clipped_with_the_rest(loss: Loss) -> None:
    bound, each = 1e-3, dpoptim.per_sample(loss)
    whole = released(each, clip_norm=bound, model=Weighted())
    for left_out in (0, 4):
        some = [i for i in range(N) if i != left_out]
        less = released(each, some, clip_norm=bound, model=Weighted(), tried=False)
        assert 0 < float((whole - less).norm()) <= bound


def test_parameters_of_others_stay_refused() -> None:
    with pytest.raises(PrivacyError, match="parameter"):
        released(dpoptim.per_sample(reads_others))


def writes_to_outputs(model: Any, batch: Any) -> Tensor:
    found = model(batch[0])
    found -= found.mean()
    found.data.sub_(found.data.mean())
    return (found * batch[1]).square().mean().sqrt()


def writes_to_the_batch(model: Any, batch: Any) -> Tensor:
    labels = batch[1].detach().numpy()
    labels -= labels.mean()
    return F.mse_loss(model(batch[0]), batch[1]).sqrt()


def scales_gradients(model: Any, batch: Any) -> Tensor:
    found = model(batch[0])
    found.register_hook(lambda g: g / g.norm())
    return F.mse_loss(found, batch[1]).sqrt()


@pytest.mark.parametrize("loss", [writes_to_outputs, writes_to_the_batch, scales_gradients])
def test_what_a_loss_writes_is_its_records_own(loss: Loss) -> None:
    batch, model = (X.clone(), Y.clone(), MASKS.clone()), network()
    each = dpoptim.per_sample(loss)(model, batch)
    assert torch.equal(batch[1], Y)  # and stays with the loss
    for i in range(N):
        own = [v[i : i + 1].clone() for v in (X, Y, MASKS)]
        torch.testing.assert_close(each[i], loss(model, own))
    found = torch.autograd.grad(each.sum(), [*model.parameters()])
    assert all(g.isfinite().all() for g in found)


def test_what_a_loss_writes_into_lists_of_mappings_stays_there() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        mean = torch.stack([each["v"] for each in batch["each"]]).mean()
        for each in batch["each"]:
            each["v"] = each["v"] - mean
            each["w"].mul_(2)
        return (model(batch["x"]) * batch["each"][0]["w"] + batch["each"][0]["v"]).mean().sqrt()

    each = [{"v": torch.tensor(1.0 * i), "w": torch.ones(())} for i in range(N)]
    found = dpoptim.per_sample(loss)(nn.Identity(), {"x": torch.ones(N, 1), "each": each})
    torch.testing.assert_close(found, torch.full((N,), 2**0.5))
    assert (each[3]["v"], each[3]["w"]) == (3, 1)


def test_a_loss_may_take_things_out_of_its_batch() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model(batch.pop("x")), batch.pop("y")).sqrt()

    batch = {"x": X, "y": Y}
    assert dpoptim.per_sample(loss)(network(), batch).shape == (N,)
    assert {*batch} == {"x", "y"}


@pytest.mark.parametrize(
    ("loss", "batch"),
    [
        (rooted, (X, Y[:4], MASKS)),
        (rooted, (X, Y, torch.tensor(3.0))),
        (rooted, ("nothing",)),
        (rooted, (X, Y, [{"box": Y[0]}] * 3)),
        (rooted, (X, Y, [3, 4])),
        (rooted, (X, Y, 45)),
        (rooted, (X, Y, MASKS.numpy())),
        (lambda model, batch: (model(batch[0]) - batch[1]).square(), (X, Y, MASKS)),
        (lambda model, batch: model(batch[0]).sum().item(), (X, Y, MASKS)),
    ],
)
def test_other_forms_are_refused(loss: Loss, batch: Any) -> None:
    with pytest.raises(PrivacyError, match="takes a batch of tensors|returns one number"):
        dpoptim.per_sample(loss)(network(), batch)


class Keeps(nn.Module):
    """Returns and keeps things of the whole batch beside each record's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.last, self.scale = 0.0, 2.0
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor, number: float = 1.0, names: Any = None) -> dict[str, Any]:
        found = self.layer(x).squeeze(-1)
        self.last = float(x.mean())
        self.mean.copy_(found.detach().mean())
        return {
            "own": found * number,
            "mean": found.mean(),
            "flat": found.flatten(),
            "number": float(found.detach().mean()),
            "numbers": found.detach()[:, 0].tolist(),
            "each": [*found],
        }


@pytest.mark.parametrize("read", ["mean", "flat", "number", "numbers", "each"])
def test_what_a_model_returns_of_the_whole_batch_is_refused_where_it_is_read(read: str) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        found = model(batch[0])
        more = found[read]
        more = sum(each.sum() for each in more) if read == "each" else more
        more = more[0] if read == "numbers" else more
        return F.mse_loss(found["own"], batch[1]) + torch.as_tensor(more).sum()

    with pytest.raises(PrivacyError, match="no row for each record"):
        dpoptim.per_sample(loss)(Keeps(), (X, Y, MASKS))

    def own(model: Any, batch: Any) -> Tensor:
        return model.scale * F.mse_loss(model(batch[0])["own"], batch[1])

    assert dpoptim.per_sample(own)(Keeps(), (X, Y, MASKS)).shape == (N,)


@pytest.mark.parametrize(
    "read", [lambda model: model.last, lambda model: model.mean, lambda model: model.forward]
)
def test_what_a_forward_pass_keeps_is_refused(read: Callable[[Any], Any]) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        found = model(batch[0])["own"]
        return F.mse_loss(found, batch[1]) * read(model)

    model = Keeps()
    model.mean += 1  # written before is no matter
    with pytest.raises(PrivacyError, match=r"this one reads"):
        dpoptim.per_sample(loss)(model, (X, Y, MASKS))


def numbers_given(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0], batch[1].max().item())["own"], batch[1])


def sizes_given(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0], float(len(batch[0])))["own"], batch[1])


def names_turned(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0], names=batch[3][::-1])["own"], batch[1])


def wide_beside_narrow(model: Any, batch: Any) -> Tensor:
    x = torch.cat([1e6 + 0 * batch[0][..., :1], batch[0][..., 1:]], -1)
    rest = x[..., 1:] - 1e-3 * x[..., 1:].mean((0, 1))
    return F.mse_loss(model(torch.cat([x[..., :1], rest], -1))["own"], batch[1])


@pytest.mark.parametrize("loss", [numbers_given, sizes_given, names_turned, wide_beside_narrow])
def test_a_record_gives_the_model_all_that_the_batch_does(loss: Loss) -> None:
    batch = (X, Y, MASKS, [str(i) for i in range(N)])
    with pytest.raises(PrivacyError, match="the same for a record"):
        dpoptim.per_sample(loss)(Keeps(), batch)


@pytest.mark.parametrize("rows", [1, 3, N])
def test_a_constant_may_be_as_long_as_several_batches(rows: int) -> None:
    class Shifted(nn.Module):
        def forward(self, shifts: Tensor, x: Tensor) -> Tensor:
            return x + shifts.mean()

    def loss(model: Any, batch: Any) -> Tensor:
        return model(torch.ones(2 * rows), batch[0]).square().mean().sqrt()

    each = dpoptim.per_sample(loss)(Shifted(), (X[:rows],))
    torch.testing.assert_close(each, (X[:rows] + 1).square().mean((1, 2)).sqrt())


def test_texts_and_lists_of_parameters() -> None:
    class Texts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(2))])

        def forward(self, x: Tensor, names: list[str]) -> Tensor:
            return x * torch.tensor([float(len(name)) for name in names])[:, None, None]

    def loss(model: Any, batch: Any) -> Tensor:
        return model(batch[0], batch[1]).square().mean().sqrt() * model.scales[0].sum()

    names = ["a" * (i + 1) for i in range(N)]
    model = Texts()
    each = dpoptim.per_sample(loss)(model, (X, names))
    for i in range(N):
        torch.testing.assert_close(each[i], loss(model, (X[i : i + 1], names[i : i + 1])))


def test_a_loss_that_sets_something_is_refused() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        model.temperature = 3.0
        return masked_by_hand(model, batch)

    with pytest.raises(PrivacyError, match=r"sets model\.temperature"):
        dpoptim.per_sample(loss)(network(), (X, Y, MASKS))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("loss", [weighted_tasks, whole_catalogue])
@pytest.mark.parametrize("isolation", ["alone", "vmap"])
def test_parameters_that_a_loss_reads_in_other_ways(loss: Loss, isolation: str) -> None:
    each = dpoptim.per_sample(loss)
    found = sum_of_one_step(
        Weighted(), DATA, each, n=N, clip_norm=1e4, loss=each, isolation=isolation
    )
    torch.testing.assert_close(found, one_by_one(loss, Weighted()), rtol=1e-4, atol=1e-5)


def test_padding_that_counts_is_still_found() -> None:
    """A record's rows are as long as the longest of the batch: trials look for what that does."""

    def padded(records: list[Any]) -> Any:
        lengths = [int(mask.sum()) for _, _, mask in records]
        longest = max(lengths)
        cut = zip(records, lengths, strict=True)
        x = torch.stack([F.pad(r[0][:k], (0, 0, 0, longest - k)) for r, k in cut])
        return x, torch.tensor(lengths)

    def loss(model: Any, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()

    model = nn.Linear(WIDTH, 1)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=3, steps=1, noise_multiplier=1.0, delta=1e-5
    )
    with (
        pytest.raises(SamplesInteractError),
        dpoptim.attach(
            plan,
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            DATA,
            loss=dpoptim.per_sample(loss),
            collate_fn=padded,
        ),
    ):
        pass
