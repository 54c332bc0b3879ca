"""A loop of one's own ends in a run directory that is verified, signed and audited as any other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.audit.command import audit_run
from dpoptim.runs.verify import verify_run
from dpoptim.training.private_training import PrivateTraining

N = 60
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def trained(
    method: Any = None, *, steps: int | None = None, batches: Any = None, **options: Any
) -> PrivateTraining:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = options.pop("plan", {"n": N, "batch_size": 10})
    plan = (method or dpoptim.DPSGD(clip_norm=1.0)).plan(
        **settings, steps=4, epsilon=2.0, delta=1e-4
    )
    with dpoptim.attach(
        plan, model, optimizer, TensorDataset(X.clone(), Y.clone()), **options
    ) as private:
        for batch in private.batches(**(batches or {})):
            private.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if private.steps_done == steps:
                break
    return private


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "certificate.json").read_text())
    return found


CASES: dict[str, dict[str, Any]] = {
    "a loss that was checked": {"loss": loss},
    "a loss that was not": {},
    "alone": {"isolation": "alone"},
    "a fixed shape": {"batches": {"fixed_shape": True}},
    "persons": {"persons": [i // 2 for i in range(N)], "plan": {"n": N // 2, "batch_size": 10}},
    "replaced records": {"plan": {"n": N, "batch_size": 10, "neighboring": "replace-one"}},
    "an order that nobody drew": {"method": dpoptim.DPFTRL(clip_norm=1.0)},
    "some of the steps": {"steps": 2},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:records pass alone", "ignore:.*persons")
def test_what_it_writes_is_verified(name: str, tmp_path: Path) -> None:
    relations = {"replaced records": "replace-one", "an order that nobody drew": "zero-out"}
    ledger = dpoptim.Ledger(tmp_path / "ledger.sqlite", neighboring=relations.get(name))
    private = trained(**CASES[name], ledger=ledger)
    folder = dpoptim.certify(private, tmp_path / "run", data="made up", settings={"rate": "0.1"})
    verified = verify_run(folder, ledgers=[tmp_path / "ledger.sqlite"])
    assert "model.pt is the model that the certificate is about" in verified.checked
    assert any(line.startswith("the ledger holds its charge") for line in verified.checked)
    assert not verified.unknown
    written = read(folder)
    assert written["guarantee"]["text"] == str(private.spent())
    assert written["verdict"]["kind"] == "proven"
    listed = {text for kind in ("enforced", "trusted") for text in written["basis"][kind]}
    assert listed == {item.text for item in private.basis}
    weights = torch.load(folder / "model.pt", weights_only=True)
    assert all(torch.equal(weights[k], v) for k, v in private.model.state_dict().items())
    assert written["training"]["rate"] == "0.1"
    assert ("ended" in written["training"]) == (name == "some of the steps")


def test_an_edit_is_seen(tmp_path: Path) -> None:
    private = trained()
    folder = dpoptim.certify(private, tmp_path / "run", data="made up")
    for path, before, after in (
        ("certificate.json", '"made up"', '"made good"'),
        ("plan.json", '"steps": 4', '"steps": 5'),
        ("report.html", "made up", "made good"),
    ):
        text = (folder / path).read_text()
        assert before in text
        (folder / path).write_text(text.replace(before, after))
        with pytest.raises(ValueError, match="edited|damaged|digest"):
            verify_run(folder)
        (folder / path).write_text(text)
    verify_run(folder)
    torch.save(nn.Linear(4, 3).state_dict(), folder / "model.pt")
    with pytest.raises(ValueError, match="not the model of this certificate"):
        verify_run(folder)
    (folder / "model.pt").unlink()
    with pytest.raises(ValueError, match="lacks what its certificate names by SHA-256: model.pt"):
        verify_run(folder)


def test_what_the_loop_releases_instead_is_said(tmp_path: Path) -> None:
    """A mean of iterates, say: whether it is one is the loop's word."""
    private = trained()
    mean = {name: torch.zeros_like(w) for name, w in private.model.state_dict().items()}
    folder = dpoptim.certify(private, tmp_path / "run", data="made up", weights=mean)
    assert not torch.load(folder / "model.pt", weights_only=True)["weight"].any()
    assert "not those that the run left" in read(folder)["training"]["weights"]
    verify_run(folder)


def test_a_repeatable_run_is_not_for_release(tmp_path: Path) -> None:
    folder = dpoptim.certify(trained(noise_seed=0), tmp_path / "run", data="made up")
    assert read(folder)["verdict"]["kind"] == "marked"
    verify_run(folder)


def test_what_has_released_nothing_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(n=N, batch_size=10, steps=4, epsilon=2.0, delta=1e-4)
    with (
        dpoptim.attach(plan, model, optimizer, TensorDataset(X.clone(), Y.clone())) as private,
        pytest.raises(dpoptim.PrivacyError, match="released anything"),
    ):
        dpoptim.certify(private, tmp_path / "run", data="made up")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="data: the certificate needs a name"):
        dpoptim.certify(trained(), tmp_path / "run", data=" ")


@pytest.mark.slow
def test_it_is_audited(tmp_path: Path) -> None:
    folder = dpoptim.certify(trained(), tmp_path / "run", data="made up")
    found = audit_run(folder, trials=2_000, seed=0)
    assert found
    assert not any("refuted" in str(each).lower() for each in found)


def test_a_model_that_was_changed_since_is_not_said_to_be_the_runs(tmp_path: Path) -> None:
    private = trained()
    assert (
        "weights"
        not in read(dpoptim.certify(private, tmp_path / "one", data="made up"))["training"]
    )
    private.model.bias.data += 1  # type: ignore[operator,union-attr]
    folder = dpoptim.certify(private, tmp_path / "two", data="made up", settings={"weights": "own"})
    assert "not those that the run left" in read(folder)["training"]["weights"]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"settings": {"lr": 0.1}}, "settings: names"), ({"weights": nn.Linear(1, 1)}, "weights: ")],
)
def test_what_is_no_text_and_no_state_is_refused(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=said):
        dpoptim.certify(trained(), tmp_path / "run", data="made up", **options)
    assert not (tmp_path / "run").exists()
