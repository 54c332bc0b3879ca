"""A loss may take its batch apart, as Hugging Face's do: every call has containers of its own."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import dpoptim
from dpoptim.training.trials.compared_batches import own_containers


class Records(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x = torch.randn(5, generator=torch.Generator().manual_seed(i))
        return {"x": x, "labels": torch.tensor(i % 3)}


def pops(model: nn.Module, batch: Any) -> Tensor:
    y = batch.pop("labels")
    return F.cross_entropy(model(batch["x"]), y, reduction="none")


def pops_of_a_mean(model: nn.Module, batch: Any) -> Tensor:
    y = batch.pop("labels")
    return F.cross_entropy(model(batch.pop("x")), y)


def puts_in_its_place(model: nn.Module, batch: Any) -> Tensor:
    batch["x"] = 2 * batch["x"]
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


def pops_and_mixes(model: nn.Module, batch: Any) -> Tensor:
    losses = pops(model, batch)
    return losses * losses.detach().mean()


def divides_in_place(model: nn.Module, batch: Any) -> Tensor:
    batch["x"].div_(3)
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


def trained(loss: Callable[..., Tensor], **options: Any) -> Tensor:
    """Weights after two steps without noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=40, batch_size=40, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    settings = {"loss": loss, "noise_seed": 0} | options
    with dpoptim.attach(plan, model, optimizer, Records(), **settings) as private:
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def loss_of_a_copy(model: nn.Module, batch: Any) -> Tensor:
    return pops(model, dict(batch))


@pytest.mark.set_aside("vmap")
@pytest.mark.parametrize("isolation", ["auto", "vmap", "alone"])
def test_labels_may_be_taken_out_of_the_batch(isolation: str) -> None:
    found = trained(pops, isolation=isolation)
    assert torch.equal(found, trained(loss_of_a_copy, isolation=isolation))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("loss", [pops_of_a_mean, puts_in_its_place, dpoptim.per_sample(pops)])
def test_batches_may_be_taken_apart(loss: Callable[..., Tensor]) -> None:
    assert trained(loss).isfinite().all()


def test_records_that_are_mixed_are_found_all_the_same() -> None:
    with pytest.raises(dpoptim.PrivacyError, match="depend on other records"):
        trained(pops_and_mixes)


def test_a_batch_that_is_written_to_is_named() -> None:
    with pytest.raises(dpoptim.PrivacyError, match=r"changes its batch in place.*x = x / 255"):
        trained(divides_in_place)


@pytest.mark.parametrize("deep", [False, True])
def test_a_container_that_every_batch_has_carries_records_on(deep: bool) -> None:
    """A list of the collate function's own: what the loss leaves there, the next batch reads."""
    seen: Any = {"kept": []}

    def collate(rows: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(rows)
        return (batch, seen if deep else seen["kept"])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        kept = batch[1]["kept"] if deep else batch[1]
        losses = F.cross_entropy(model(batch[0]["x"]), batch[0]["labels"], reduction="none")
        earlier = 1 + sum(kept)
        kept.append(losses.detach().mean())
        return losses * earlier

    with pytest.raises(dpoptim.PrivacyError, match="remember what they saw"):
        trained(loss, collate_fn=collate)


def test_check_serves_them_too() -> None:
    batch = {"x": torch.randn(6, 5), "labels": torch.arange(6) % 3}
    assert dpoptim.check(nn.Linear(5, 3), pops, batch).loss_reduction == "none"
    assert set(batch) == {"x", "labels"}


def test_containers_are_new_and_tensors_are_not() -> None:
    x, own = torch.ones(2), UserDict({"x": torch.ones(1)})
    batch = {"list": [x, (x, {"deep": x})], "own": own}
    found = own_containers(batch)
    found["list"][1][1].pop("deep")
    found["own"].pop("x")
    assert batch["list"][1][1]["deep"] is x
    assert set(own) == {"x"}
    assert found["list"][0] is x
