"""A loop of one's own ends in a run directory that is verified, signed and audited as any other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpoptim
from dpoptim.audit.command import audit_run
from dpoptim.runs.assumptions import OTHER_WEIGHTS
from dpoptim.runs.verify import verify_run
from dpoptim.training.model_as_left import same_entries
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
    model = options.pop("model", None) or nn.Linear(4, 3)
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


def other_weights_in(folder: Path, *, voucher: str = "by nobody's word") -> bool:
    """Whether the weights are listed on trust: in certificate, report and what verify says."""
    said = OTHER_WEIGHTS.text in read(folder)["basis"]["trusted"]
    shown = f"on trust: {OTHER_WEIGHTS.text}" in (folder / "report.html").read_text()
    named = f"that {OTHER_WEIGHTS.text}: {voucher}" in verify_run(folder).open
    assert said == shown == named == ("weights" in read(folder)["training"])
    return said


def test_what_the_loop_releases_instead_is_said(tmp_path: Path) -> None:
    """A mean of iterates, say: whether it is one is the loop's word."""
    private = trained()
    mean = {name: torch.zeros_like(w) for name, w in private.model.state_dict().items()}
    with pytest.warns(UserWarning, match="not known to be those that the run left"):
        folder = dpoptim.certify(
            private, tmp_path / "run", data="made up", weights=mean, vouched_by="Ada"
        )
    assert not torch.load(folder / "model.pt", weights_only=True)["weight"].any()
    assert other_weights_in(folder, voucher="vouched for by Ada")


def test_the_runs_own_weights_handed_over_are_its_own(tmp_path: Path) -> None:
    private = trained()
    own = {name: w.clone() for name, w in private.model.state_dict().items()}
    for prefix in ("", "module.", "_orig_mod."):  # as DistributedDataParallel and compile name it
        named = {prefix + name: w for name, w in own.items()}
        folder = dpoptim.certify(private, tmp_path / "run", data="made up", weights=named)
        assert not other_weights_in(folder)


def test_entries_that_are_no_tensors_are_compared_by_what_they_hold() -> None:
    held = {"extra": [torch.arange(3), {"a": 1}], "words": ("b", 2)}
    again = {"extra": [torch.arange(3), {"a": 1}], "words": ("b", 2)}
    assert same_entries(held, again)
    assert not same_entries(held, again | {"extra": [torch.zeros(3), {"a": 1}]})
    assert not same_entries(held, again | {"words": torch.ones(2)})


def test_the_random_iterate_is_the_runs_own(tmp_path: Path) -> None:
    private = trained(random_iterate=True)
    private.swap_random_iterate()
    assert not other_weights_in(dpoptim.certify(private, tmp_path / "one", data="made up"))
    private.model.bias.data += 1  # type: ignore[operator,union-attr]
    private.swap_random_iterate()  # what was changed is kept now
    private.swap_random_iterate()
    with pytest.warns(UserWarning, match="not known"):
        folder = dpoptim.certify(private, tmp_path / "two", data="made up")
    assert other_weights_in(folder)


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


def plain_epochs(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(TensorDataset(X, Y), 10):
        optimizer.zero_grad()
        loss(model, batch).mean().backward()
        optimizer.step()


def another_layer(model: nn.Module) -> None:
    """Trained elsewhere, without privacy; the run's own parameters stay as they were."""
    model[0] = nn.Linear(4, 3)  # type: ignore[operator]


def a_buffer(model: nn.Module) -> None:
    model.register_buffer("mean", X.mean(0))


def one_more_layer(model: nn.Module) -> None:
    model.append(nn.Linear(3, 3))  # type: ignore[operator]


@pytest.mark.parametrize("change", [plain_epochs, another_layer, a_buffer, one_more_layer])
def test_a_model_that_was_changed_since_is_not_said_to_be_the_runs(
    change: Any, tmp_path: Path
) -> None:
    private = trained(model=nn.Sequential(nn.Linear(4, 3)))
    folder = dpoptim.certify(private, tmp_path / "one", data="made up", settings={"a": "b"})
    assert not other_weights_in(folder)
    change(private.model)
    with pytest.warns(UserWarning, match="one step without privacy undoes it"):
        folder = dpoptim.certify(private, tmp_path / "two", data="made up")
    assert other_weights_in(folder)
    with pytest.raises(dpoptim.PrivacyError, match="not as the run left it"):
        private.save(tmp_path / "checkpoint")


def test_what_holds_the_same_is_as_left(tmp_path: Path) -> None:
    """In other memory, as on another device, or loaded again."""
    private = trained()
    kept = {name: w.clone() for name, w in private.model.state_dict().items()}
    private.model._apply(lambda t: t.clone())  # as .to(device) does
    assert not other_weights_in(dpoptim.certify(private, tmp_path / "one", data="made up"))
    plain_epochs(private.model)
    private.model.load_state_dict(kept)
    assert not other_weights_in(dpoptim.certify(private, tmp_path / "two", data="made up"))


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
