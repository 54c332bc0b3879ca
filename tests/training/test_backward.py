"""`private.backward`: one loss a record needs no reduction; of a scalar it is read, and what
cannot be right is refused.
"""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.training.losses.reduction import read_reduction

N, FEATURES, CLASSES = 60, 6, 3


def problem() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    return model, TensorDataset(torch.randn(N, FEATURES), torch.randint(0, CLASSES, (N,)))


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plan(method: Any = None, **options: Any) -> dpoptim.Plan:
    settings = {
        "n": N,
        "batch_size": 20,
        "steps": 4,
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        **options,
    }
    return (method or dpoptim.DPSGD(clip_norm=1.0)).plan(**settings)


def vector(private: Any, output: Tensor, y: Tensor) -> None:
    private.backward(F.cross_entropy(output, y, reduction="none"))


def trained(
    step: Callable[[Any, Tensor, Tensor], None], promise: dpoptim.Plan, **options: Any
) -> Tensor:
    model, data = problem()
    size = options.pop("physical_batch_size", None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dpoptim.attach(promise, model, optimizer, data, noise_seed=1, **options) as private:
        for x, y in private.batches(physical_batch_size=size):
            step(private, model(x), y)
            optimizer.step()
    return parameters(model)


def test_a_vector_gives_what_a_declared_reduction_gives() -> None:
    def bare(private: Any, output: Tensor, y: Tensor) -> None:
        F.cross_entropy(output, y, reduction="sum").backward()

    for size in (None, 3):
        ours = trained(vector, plan(), physical_batch_size=size)
        theirs = trained(bare, plan(), physical_batch_size=size, loss_reduction="sum")
        assert torch.equal(ours, theirs)
    no_clipping = dpoptim.DPSGD(clip_norm=1e6)
    mean = trained(
        lambda _, output, y: F.cross_entropy(output, y).backward(),
        plan(no_clipping, noise_multiplier=0),
    )
    torch.testing.assert_close(
        trained(vector, plan(no_clipping, noise_multiplier=0)), mean, rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("declared", [None, "mean", "sum"])
def test_what_was_declared_does_not_matter_for_a_vector(declared: Any) -> None:
    assert torch.equal(trained(vector, plan(), loss_reduction=declared), trained(vector, plan()))


@pytest.mark.parametrize(
    "method",
    [
        dpoptim.DPSGD(1.0),
        dpoptim.ValueClippedSGD(1.0),
        dpoptim.DPSGD(dpoptim.PrivateQuantile(0.5, share=0.5)),
        dpoptim.DiceSGD(clip_norm=0.5, residual_clip=1.0),
        dpoptim.DPFTRL(1.0),
    ],
    ids=lambda method: type(method).__name__,
)
def test_every_method_takes_a_vector(method: Any) -> None:
    relation = (
        "add-or-remove-one" if type(method).__name__ in ("DPSGD", "ValueClippedSGD") else "zero-out"
    )
    promise = plan(method, batch_size=N, noise_multiplier=0.1, neighboring=relation)
    assert not torch.equal(trained(vector, promise), parameters(problem()[0]))


def test_an_empty_batch_counts_as_nothing() -> None:
    """Record 0 stands in for it, whatever its loss."""

    def huge(private: Any, output: Tensor, y: Tensor) -> None:
        private.backward(1e30 * output.sum(1))

    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rare = plan(dpoptim.DPSGD(1.0), n=10**6, batch_size=1, steps=3, noise_multiplier=0)
    before = parameters(model)
    with dpoptim.attach(rare, model, optimizer, data, noise_seed=0) as private:
        for x, y in private.batches():
            huge(private, model(x), y)
            optimizer.step()
    assert torch.equal(parameters(model), before)


def test_autocast_needs_no_declaration() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        for x, y in private.batches():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = F.cross_entropy(model(x), y, reduction="none")
            private.backward(losses)
            optimizer.step()
        assert any("rounded the same" in item.text for item in private.basis)
    _, data = problem()
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        x, y = next(private.batches())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y, reduction="none").mean()
        with pytest.raises(
            dpoptim.PrivacyError,
            match=r"with a loss that is a "
            r"mean.*private\.backward\(losses\)",
        ):
            private.backward(loss)


# ---- scalars ------------------------------------------------------------------------------------

T = torch.rand(4, 3)
Y = torch.tensor([0, 1, 2, 1])
LOSSES = {
    "cross-entropy": lambda x, r: F.cross_entropy(x, Y, reduction=r),
    "label smoothing": lambda x, r: F.cross_entropy(x, Y, reduction=r, label_smoothing=0.1) * 2,
    "mse": lambda x, r: F.mse_loss(x, T, reduction=r),
    "l1": lambda x, r: F.l1_loss(x, T, reduction=r),
    "huber": lambda x, r: F.huber_loss(x, T, reduction=r),
    "smooth l1": lambda x, r: F.smooth_l1_loss(x, T, reduction=r),
    "bce with logits": lambda x, r: F.binary_cross_entropy_with_logits(x, T, reduction=r),
    "bce": lambda x, r: F.binary_cross_entropy(x.sigmoid(), T, reduction=r),
    "poisson": lambda x, r: F.poisson_nll_loss(x, T, reduction=r),
    "triplet": lambda x, r: F.triplet_margin_loss(x, T, T + 1, reduction=r),
    "margin": lambda x, r: F.multi_margin_loss(x, Y, reduction=r),
    "by hand": lambda x, r: getattr(x.square().sum(1), r)(),
    "by hand, an axis": lambda x, r: getattr(x.square().sum(1), r)(0),
    "by hand, records first": lambda x, r: getattr(x.square(), r)(0).sum(),
    "by hand, records first, then a mean": lambda x, r: getattr(x.square(), r)(-2).mean(),
    "one by one": lambda x, r: getattr(torch.stack([row.square().mean() for row in x]), r)(),
    "two terms": lambda x, r: getattr(x.square().sum(1), r)() + F.mse_loss(x, T, reduction=r),
    "halved": lambda x, r: 0.5 * getattr(x.square().sum(1), r)() / torch.tensor(2.0),
    "wide": lambda x, r: F.mse_loss(x, T, reduction=r).double(),
}

LOSSES_OF: dict[str, Callable[[Tensor, Tensor, Tensor, str], Tensor]] = {
    "mse": lambda x, t, y, r: F.mse_loss(x, t, reduction=r),
    "l1": lambda x, t, y, r: F.l1_loss(x, t, reduction=r),
    "huber": lambda x, t, y, r: F.huber_loss(x, t, reduction=r),
    "smooth l1": lambda x, t, y, r: F.smooth_l1_loss(x, t, reduction=r),
    "bce with logits": lambda x, t, y, r: F.binary_cross_entropy_with_logits(x, t, reduction=r),
    "margin": lambda x, t, y, r: F.multi_margin_loss(x, y, reduction=r),
    "two terms": lambda x, t, y, r: F.mse_loss(x, t, reduction=r) + F.l1_loss(x, t, reduction=r),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_reductions_are_read_off_the_graph(name: str, reduction: str) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    reading = read_reduction(LOSSES[name](x, reduction), 4)
    assert reading is not None
    assert reading.reduction == reduction


@pytest.mark.thinned(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "name", ["mse", "l1", "huber", "smooth l1", "bce with logits", "margin", "two terms"]
)
def test_reductions_are_read_where_a_layer_is_next_to_the_loss(name: str, reduction: str) -> None:
    x, target = torch.randn(N, FEATURES), torch.rand(N, CLASSES)
    data = TensorDataset(x, target, torch.randint(CLASSES, (N,)))

    def trained(scalar: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, CLASSES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with dpoptim.attach(plan(noise_multiplier=0.0), model, optimizer, data, noise_seed=1) as p:
            for inputs, targets, labels in p.batches():
                each = LOSSES_OF[name](model(inputs), targets, labels, "none")
                whole = LOSSES_OF[name](model(inputs), targets, labels, reduction)
                width = each[0].numel()
                one = each.flatten(1).sum(1) if each.dim() > 1 else each
                p.backward(whole if scalar else one / (width if reduction == "mean" else 1))
                optimizer.step()
                optimizer.zero_grad()
        return parameters(model)

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-3, atol=1e-4)


def test_means_over_labels_are_terms_where_there_is_one_a_record() -> None:
    """Scores of two passes are no smoothing; of several a record, only a check knows whose."""
    x = torch.randn(4, 3, requires_grad=True)
    for loss in (
        F.cross_entropy(x, Y) + F.cross_entropy(x, Y),
        0.9 * F.cross_entropy(x, Y) - 0.1 * x.log_softmax(1).mean(),
    ):
        found = read_reduction(loss, 4)
        assert found is not None
        assert (found.reduction, found.labels) == ("mean", {4})
        with pytest.raises(dpoptim.SamplesInteractError, match="labels of the whole batch"):
            read_reduction(loss, 2)
        assert read_reduction(loss, 2, checked=True) == found


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: x.sum() * x.mean(),
        lambda x: 2 / x.sum(),
        lambda x: x.logsumexp((0, 1)),
        lambda x: x.sum() / x.detach().sum().requires_grad_(),
        lambda x: x.sum() + x.mean(),
        lambda x: x.mean(0).sum() + x.sum(),
        lambda x: (x @ x.T).mean(0).sum(),
        lambda x: x[0, 0].clone() * 1,
        # means of tasks or columns: a sum of these is none of records' losses
        lambda x: (x.square().mean(0) * T[0]).sum(),
        lambda x: (torch.stack([x.mean(), F.cross_entropy(x, Y)]) * T[0, :2]).sum(),
        lambda x: torch.stack([x[:, 0].mean(), F.mse_loss(x, T)]).mean(),
    ],
)
def test_what_is_not_plain_is_not_guessed(loss: Callable[[Tensor], Tensor]) -> None:
    assert read_reduction(loss(torch.randn(4, 3, requires_grad=True)), 4) is None


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            lambda x: F.cross_entropy(x.view(4, 3, 1).expand(4, 3, 5), Y[:, None].expand(4, 5)),
            "labels of the whole batch",
        ),
        (lambda x: F.cross_entropy(x.repeat(5, 1), Y.repeat(5)), "labels of the whole batch"),
        (
            lambda x: x.sum(1)[torch.tensor([True, True, True, False])].mean(),
            "no multiple of the number of records",
        ),
        (lambda x: F.mse_loss(x[:, :1], T[:, 0]), "different shapes"),
    ],
    ids=["tokens", "flat tokens", "chosen records", "broadcast"],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_means_over_something_else_are_refused(loss: Callable[[Tensor], Tensor], said: str) -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match=f"{said}(.|\n)*Fix"):
        read_reduction(loss(torch.randn(4, 3, requires_grad=True)), 4)


def summed(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="sum")


MULTIPLES = {  # a sum by a number that is no multiple of a batch's records, and one that always is
    "a constant batch size": lambda output, y: summed(output, y) / 20.0,
    "a constant share": lambda output, y: summed(output, y) * (1 / 20),
    "a temperature": lambda output, y: summed(output, y) / 0.07,
    "one": lambda output, y: summed(output, y) / torch.tensor(1),
    "the batch's length": lambda output, y: summed(output, y) / len(y),
    "soft labels": lambda output, y: F.cross_entropy(output, F.one_hot(y, 3).float()),
}


@pytest.mark.parametrize("declared", ["mean", None])
@pytest.mark.parametrize("name", MULTIPLES)
def test_a_multiple_of_a_sum_is_taken_for_no_mean(name: str, declared: Any) -> None:
    """By the constant batch size, as in tutorials; taken for a mean, a record moved it by 1.96 C.

    Whatever the number and the batch: how many records it has decides nothing.
    """

    def step(private: Any, output: Tensor, y: Tensor) -> None:
        asked.append(private.spent().epsilon)
        private.backward(MULTIPLES[name](output, y))

    asked: list[float] = []
    with pytest.raises(dpoptim.PrivacyError, match=r"sum over the batch(.|\n)*losses\.mean\(\)"):
        trained(step, plan(), loss_reduction=declared)
    assert asked == [0.0]


@pytest.mark.parametrize("name", ["a constant batch size", "a constant share", "a temperature"])
def test_a_constant_multiple_of_a_declared_sum_trains_as_its_vector(name: str) -> None:
    scalar = trained(
        lambda private, output, y: private.backward(MULTIPLES[name](output, y)),
        plan(),
        loss_reduction="sum",
    )

    def vector(private: Any, output: Tensor, y: Tensor) -> None:
        ones = F.cross_entropy(output, y, reduction="none")
        factor = MULTIPLES[name](output, y).detach() / ones.sum().detach()
        private.backward(ones * factor)

    torch.testing.assert_close(scalar, trained(vector, plan()))


@pytest.mark.parametrize("name", ["the batch's length", "soft labels"])
def test_a_declared_sum_by_a_number_that_changes_is_refused(name: str) -> None:
    with pytest.raises(dpoptim.PrivacyError, match=r"another number(.|\n)*Fix"):
        trained(
            lambda private, output, y: private.backward(MULTIPLES[name](output, y)),
            plan(),
            loss_reduction="sum",
        )


def by_loss(name: str, declared: Any = None) -> Tensor:
    """Weights after a run whose loss `attach` was given."""

    def step(private: Any, output: Tensor, y: Tensor) -> None:
        private.backward(MULTIPLES[name](output, y))

    return trained(
        step,
        plan(),
        loss_reduction=declared,
        loss=lambda model, batch: MULTIPLES[name](model(batch[0]), batch[1]),
    )


@pytest.mark.thinned(2)
@pytest.mark.parametrize("declared", ["mean", None])
@pytest.mark.parametrize("name", ["the batch's length", "soft labels"])
def test_batches_of_two_sizes_show_that_a_divided_sum_is_a_mean(name: str, declared: Any) -> None:
    def step(private: Any, output: Tensor, y: Tensor) -> None:
        private.backward(F.cross_entropy(output, y, reduction="none").mean())

    mean = trained(step, plan())
    torch.testing.assert_close(by_loss(name, declared), mean)


def test_batches_of_two_sizes_show_that_a_constant_makes_no_mean() -> None:
    for declared, said in (("mean", "is a sum over the batch"), (None, "divided or multiplied")):
        with pytest.raises(dpoptim.PrivacyError, match=f"{said}(.|\n)*Fix"):
            by_loss("a constant batch size", declared)
    with pytest.raises(dpoptim.PrivacyError, match='is a mean over the batch(.|\n)*"sum"'):
        by_loss("the batch's length", "sum")
    by_loss("a temperature", "sum")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_pass_over_a_batch_is_refused_by_name(reduction: str) -> None:
    def step(private: Any, output: Tensor, y: Tensor) -> None:
        for _ in range(2):
            private.backward(F.cross_entropy(output.clone(), y, reduction=reduction))

    with pytest.raises(dpoptim.PrivacyError, match="called again(.|\n)*Fix"):
        trained(step, plan())


def test_a_scalar_must_be_what_was_declared() -> None:
    """README's example with the loss left at its mean: chance accuracy, and no error."""
    criterion = nn.CrossEntropyLoss()
    with pytest.raises(
        dpoptim.PrivacyError,
        match='is a mean over the batch, but attach was told loss_reduction="sum"',
    ):
        trained(
            lambda private, output, y: private.backward(criterion(output, y)),
            plan(),
            loss_reduction="sum",
        )
    with pytest.raises(
        dpoptim.PrivacyError, match="does not show whether it is the mean or the sum"
    ):
        trained(lambda private, output, y: private.backward(criterion(output, y) ** 1.0), plan())
    scaled = trained(
        lambda private, output, y: private.backward(criterion(output, y) * 1.0),
        plan(),
        loss_reduction="mean",
    )
    torch.testing.assert_close(
        scaled, trained(lambda private, output, y: private.backward(criterion(output, y)), plan())
    )


@pytest.mark.parametrize(
    ("weights", "smoothing"),
    [(None, 0.0), (None, 0.3), (torch.tensor([1.0, 9.0, 0.2]), 0.0)],
    ids=["ignored labels", "smoothed, ignored labels", "class weights"],
)
def test_one_record_moves_a_mean_over_labels_by_no_more_than_the_bound(
    weights: Tensor | None, smoothing: float
) -> None:
    """torch divides it by the weights of all labels, of which one may be heavy: 1.8 C with 1/B in
    its place.
    """
    x, y = torch.ones(N, FEATURES), torch.zeros(N, dtype=torch.long)
    y[-1] = -100 if weights is None else 1
    sums = []
    for rows in (N, N - 1):
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, CLASSES)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        # The gradients are all just within the bound, so that any factor shows.
        tight = plan(dpoptim.DPSGD(2.2), n=N, batch_size=N, steps=1, noise_multiplier=0)
        before = parameters(model)
        with dpoptim.attach(tight, model, optimizer, TensorDataset(x[:rows], y[:rows])) as private:
            for a, b in private.batches():
                scores = model(a)
                loss = F.cross_entropy(scores, b, weight=weights, label_smoothing=smoothing)
                private.backward(loss)
                optimizer.step()
        sums.append((before - parameters(model)) * N)
    assert float((sums[0] - sums[1]).norm()) <= 2.2 * (1 + 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_smoothed_labels_train_as_their_vector(reduction: str) -> None:
    def step(private: Any, output: Tensor, y: Tensor, reduction: str) -> None:
        y = torch.where(y == 2, -100, y)
        private.backward(F.cross_entropy(output, y, reduction=reduction, label_smoothing=0.2))

    scalar, vector = (
        trained(partial(step, reduction=each), plan()) for each in (reduction, "none")
    )
    torch.testing.assert_close(scalar, vector, rtol=1e-4, atol=1e-5)


def test_vectors_that_are_not_the_batchs_are_refused_without_its_size() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        x, y = next(private.batches())
        losses = F.cross_entropy(model(x), y, reduction="none")
        for wrong in (
            losses[:-1],
            losses[:, None].expand(-1, 2),
            losses[:-1, None],
            losses.repeat(2),
            losses[:, None] - losses,
        ):
            with pytest.raises(
                dpoptim.PrivacyError,
                match=r"shape "
                r'\(rows,\).*Fix.*reduction="none"',
            ) as caught:
                private.backward(wrong)
            assert str(len(x)) not in str(caught.value)
        with pytest.raises(dpoptim.PrivacyError, match="do not depend on anything trainable"):
            private.backward(losses.detach())
        with pytest.raises(TypeError, match="one loss for each record, got float"):
            private.backward(0.5)  # type: ignore[arg-type]
        private.backward(losses)
        with pytest.raises(dpoptim.PrivacyError, match=r"again for rows.*add both losses"):
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()


def test_parts_of_a_batch() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dpoptim.attach(
        plan(noise_multiplier=0), model, optimizer, data, noise_seed=1, partial_backward=True
    ) as private:
        for x, y in private.batches():
            half = len(x) // 2
            for part in (slice(None, half), slice(half, None)):
                vector(private, model(x[part]), y[part])
            optimizer.step()
    torch.testing.assert_close(parameters(model), trained(vector, plan(noise_multiplier=0)))


# ---- optimizers and their hooks -----------------------------------------------------------------


class Polyak(torch.optim.SGD):
    """Its step length is the loss's, which is private."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=float(loss))
        return loss


@pytest.mark.parametrize("kind", [Polyak, torch.optim.SGD])
def test_an_optimizer_is_handed_no_private_loss(kind: Any) -> None:
    model, data = problem()
    optimizer = kind(model.parameters(), lr=0.1)
    before = parameters(model)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        x, y = next(private.batches())

        def closure() -> Tensor:
            losses = F.cross_entropy(model(x), y, reduction="none")
            private.backward(losses)
            return losses.mean()

        if kind is Polyak:
            with pytest.raises(dpoptim.PrivacyError, match="read the loss that a closure returned"):
                optimizer.step(closure)
        else:
            returned = optimizer.step(closure)
            with pytest.raises(dpoptim.PrivacyError, match="it is private"):
                print(returned)
    assert torch.equal(parameters(model), before) == (kind is Polyak)


def test_hooks_registered_before_attaching_find_the_noisy_mean() -> None:
    """README's "clip in a hook" did nothing if the hook came first."""
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    optimizer.register_step_pre_hook(clip)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        for x, y in private.batches():
            before = parameters(model)
            vector(private, model(x), y)
            optimizer.step()
            assert 0 < float((parameters(model) - before).norm()) <= 1.001e-3


def test_hooks_that_would_find_nothing_are_refused() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        handle = getattr(model[0].weight, register)(lambda g: None)  # type: ignore[index]
        with pytest.raises(
            dpoptim.PrivacyError,
            match="'0.weight' has a hook on its gradient.*register_step_pre_hook",
        ):
            dpoptim.attach(plan(), model, optimizer, data)
        handle.remove()
    everywhere = register_optimizer_step_pre_hook(lambda *_: None)
    with pytest.raises(dpoptim.PrivacyError, match="for all optimizers"):
        dpoptim.attach(plan(), model, optimizer, data)
    everywhere.remove()


# ---- what is said -------------------------------------------------------------------------------


def test_loss_not_checked_heads_what_is_trusted() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        trusted = [item.text for item in private.basis if item.kind == "trusted"]
        assert trusted[0].startswith("loss not checked")
        assert not any("reduction" in text or "mean over the batch" in text for text in trusted)
        described = [
            line for line in private.describe().splitlines() if line.startswith("  trusted")
        ]
        assert "loss not checked" in described[0]
        batches = private.batches()

        def mean(*given: Tensor) -> Tensor:
            return F.cross_entropy(*given, reduction="none").mean()

        for loss, said in (
            (mean, "what was summed or averaged to the loss is one term per record"),
            (mean, "mean over the batch of one term per record, which nobody declared"),
        ):
            x, y = next(batches)
            # what is given a number to multiply by is not looked at
            loss(model(x), y).backward(torch.tensor(1.0) if "nobody" in said else None)
            stated = [item.text for item in private.basis if item.kind == "trusted"]
            assert said in stated[1]
            assert any("factor of a mean" in text for text in stated)
            optimizer.step()


# ---- one output, two models, compiled ones ------------------------------------------------------


def test_losses_of_one_output_need_not_be_squeezed() -> None:
    data = TensorDataset(torch.randn(N, FEATURES), torch.randint(2, (N, 1)).float())

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="none")

    def trained(squeezed: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with dpoptim.attach(plan(), model, optimizer, data, loss=loss, noise_seed=1) as private:
            for batch in private.batches():
                losses = loss(model, batch)
                private.backward(losses[:, 0] if squeezed else losses)
                optimizer.step()
                optimizer.zero_grad()
        return parameters(model)

    assert torch.equal(trained(True), trained(False))


def test_losses_of_several_outputs_are_refused() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        inputs, _ = next(private.batches())
        with pytest.raises(dpoptim.PrivacyError, match="shape \\(rows,\\); got 2 axes"):
            private.backward(model(inputs).square())


def critic_beside_a_generator(how: str) -> Tensor:
    """The critic's parameters; each pass through it for a generator gives what it gives without."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, FEATURES), nn.Linear(FEATURES, 1)
    data, z = TensorDataset(torch.randn(N, FEATURES)), torch.randn(7, 2)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.5)
    learners = [*generator.parameters()]
    with dpoptim.attach(plan(), critic, optimizer, data, noise_seed=1) as private:
        for (real,) in private.batches():
            plain = copy.deepcopy(critic)  # of an attached model: an ordinary one
            expected = torch.autograd.grad(F.softplus(-plain(generator(z))).sum(), learners)
            loss = F.softplus(-critic(generator(z))).sum()
            generator.zero_grad()
            if how == "inputs":
                loss.backward(inputs=learners)
                torch.testing.assert_close([p.grad for p in learners], [*expected])
            elif how == "grad":
                torch.testing.assert_close(torch.autograd.grad(loss, learners), expected)
            fake = torch.ones_like(real)
            private.backward(F.softplus(-critic(real)) + F.softplus(critic(fake)))
            optimizer.step()
            optimizer.zero_grad()
    return parameters(critic)


@pytest.mark.parametrize("how", ["inputs", "grad"])
def test_another_model_learns_through_the_attached_one(how: str) -> None:
    assert torch.equal(critic_beside_a_generator(how), critic_beside_a_generator("not at all"))


def test_a_pass_for_another_model_is_refused_with_the_words_for_it() -> None:
    generator, critic = nn.Linear(2, FEATURES), nn.Linear(FEATURES, 1)
    data = TensorDataset(torch.randn(N, FEATURES))
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.5)
    with (
        dpoptim.attach(plan(), critic, optimizer, data),
        pytest.raises(dpoptim.PrivacyError, match=r"loss\.backward\(inputs="),
    ):
        critic(generator(torch.randn(7, 2))).sum().backward()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("isolation", ["rules", "vmap", "alone"])
def test_a_compiled_model_is_attached_as_the_one_inside(called: bool, isolation: Any) -> None:
    def trained(compiled: bool) -> Tensor:
        inner, data = problem()
        model: Any = torch.compile(inner, backend="eager") if compiled else inner
        if called:
            model(torch.randn(3, FEATURES)).sum().backward()
            model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

        with dpoptim.attach(
            plan(), model, optimizer, data, loss=loss, noise_seed=1, isolation=isolation
        ) as private:
            for batch in private.batches():
                private.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
        return parameters(inner)

    torch.testing.assert_close(trained(True), trained(False))


@pytest.mark.parametrize("noisy", [False, True])
def test_a_sum_of_which_one_term_has_a_factor_is_a_sum(noisy: bool) -> None:
    """The loss of a variational autoencoder, as it is usually written."""

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.back = nn.Linear(FEATURES, 4), nn.Linear(2, FEATURES)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_variance = self.code(x).chunk(2, -1)
            noise = torch.randn_like(mean) if noisy else torch.zeros_like(mean)
            return self.back(mean + noise * (0.5 * log_variance).exp()), mean, log_variance

    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        (x,) = batch
        seen, mean, log_variance = model(x)
        divergence = -0.5 * torch.sum(1 + log_variance - mean.square() - log_variance.exp())
        return F.mse_loss(seen, x, reduction="sum") + divergence

    model, data = Autoencoder(), TensorDataset(torch.randn(N, FEATURES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dpoptim.attach(plan(), model, optimizer, data, loss=loss) as private:
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert private.steps_done == 4


@pytest.mark.parametrize(
    ("reduction", "bare", "told"),
    [("mean", False, 1), ("mean", True, 1), ("sum", False, 0), ("none", False, 0)],
)
def test_a_mean_over_a_large_batch_tells_what_rounding_takes(
    reduction: str, bare: bool, told: int
) -> None:
    data = TensorDataset(torch.randn(20_000, 2), torch.randint(2, (20_000,)))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    promise = plan(n=20_000, batch_size=10_000, steps=2)
    with (
        dpoptim.attach(promise, model, optimizer, data) as private,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for x, y in private.batches(fixed_shape=False):
            losses = F.cross_entropy(model(x), y, reduction="none")
            losses = {"mean": losses.mean(), "sum": losses.sum(), "none": losses}[reduction]
            losses.backward() if bare else private.backward(losses)
            optimizer.step()
            optimizer.zero_grad()
    said = [str(each.message) for each in caught if "of the clip norm" in str(each.message)]
    assert len(said) == told
    assert all('reduction="none"' in each for each in said)
