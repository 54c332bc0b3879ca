"""What a data set or a collate function says of a record that it cannot read stays inside."""

import traceback
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import dpoptim
from dpoptim.training.batches.user_code import SWITCH

SECRET = "SECRET=42"


class Bad(Dataset[Any]):
    def __init__(self, error: type[BaseException] = ValueError) -> None:
        self.error = error

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if index == 0:  # which `attach` reads
            return torch.ones(3), torch.tensor(1)
        raise self.error(f"row {index} holds {SECRET}")


class BadAtOnce(Bad):
    def __getitems__(self, indices: list[int]) -> Any:
        int(f"{SECRET} of {indices}")  # raised by Python itself


def bad_collate(records: list[Any]) -> Any:
    raise KeyError(f"{SECRET} in {records}")


def trained(data: Dataset[Any], evaluate: bool = False, **loader: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(1.0).plan(n=20, batch_size=20, steps=1, noise_multiplier=1.0, delta=1e-3)
    train_set = TensorDataset(torch.randn(20, 3)) if evaluate else data
    with dpoptim.attach(plan, model, optimizer, train_set) as private:
        if evaluate:
            private.evaluate(data, epsilon=1.0, n=20)
        for _ in private.batches(**loader):
            pass


def said_of(error: BaseException) -> str:
    """All that a console or an error tracker is shown, chained errors included."""
    assert error.__cause__ is error.__context__ is None
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("data", "options", "kind"),
    [
        (Bad(), {}, "ValueError"),
        (BadAtOnce(), {}, "ValueError"),
        ([(torch.ones(3),) for _ in range(20)], {"collate_fn": bad_collate}, "KeyError"),
    ],
    ids=["item", "items", "collate_fn"],
)
def test_only_class_and_place_are_said(data: Any, options: Any, kind: str, workers: int) -> None:
    with pytest.raises(dpoptim.PrivacyError, match=rf"raised {kind} at ") as raised:
        trained(data, num_workers=workers, **options)
    said = said_of(raised.value)
    assert SECRET not in said
    assert f"{kind} at {__file__}, line " in said


def test_a_hold_out_says_no_more() -> None:
    with pytest.raises(dpoptim.PrivacyError, match="raised ValueError") as raised:
        trained(Bad(), evaluate=True)
    assert SECRET not in said_of(raised.value)


def test_whoever_asks_sees_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    with pytest.raises(ValueError, match=SECRET):
        trained(Bad())


def test_interrupts_and_errors_of_this_package_stay_as_they_are() -> None:
    with pytest.raises(KeyboardInterrupt):
        trained(Bad(KeyboardInterrupt))
    with pytest.raises(dpoptim.PrivacyError, match="None"):
        trained([None] * 20)  # type: ignore[arg-type]
