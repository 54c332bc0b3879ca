"""What `dpoptim train` trains is this package's own program: its certificate asks nobody to vouch
for loop, loss and model, and these tests try what such a line would have said.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from dpoptim import DPSGD, Ledger
from dpoptim.accounting.guarantee import Guarantee
from dpoptim.cli import app
from dpoptim.data import Data
from dpoptim.installed import SOURCES, digests, folder_digest
from dpoptim.methods import DPSGD as Method
from dpoptim.optimizers import optimizer
from dpoptim.runs import assumptions, interrupted, train
from dpoptim.runs.models import MODELS, build_model
from dpoptim.runs.train import Optimization, batch_losses, train_privately
from dpoptim.training.assumptions import PACKAGE

ROWS = 5
SHAPE = (1, 8, 8)
LOSSES = {
    "classes": (torch.tensor([0, 2, 1, 2, 0]), None),
    "weighted classes": (torch.tensor([0, 2, 1, 2, 0]), torch.tensor([0.2, 1.0, 0.5])),
    "numbers": (torch.linspace(-1, 1, ROWS), None),
}
TRUSTED = [  # by whoever reads a certificate; a line more is a decision about who vouches for it
    "the shape of a record is public",
    "n=1438 is a public number that was not derived from the data",
    "one record is the unit of privacy: no person contributed more than one",
    "the data set yields every record without an error, by itself, whatever else is drawn",
    "nobody exploits rounding or overflow in the model, the last bits of noisy numbers, or timing",
    "settings, preprocessing and stopping were not chosen by looking at the private data",
    "other runs on this data are added up elsewhere: the ledger was in memory",
    "vendor kernels are batch-invariant (batches(fixed_shape=True) needs no such trust)",
    PACKAGE.text,
]


def made(name: str) -> nn.Module:
    """A model of the command line, moved away from a start that knows no input."""
    model = build_model(name, SHAPE, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def farthest_reach(model: nn.Module, y: Tensor, weights: Tensor | None) -> float:
    """The largest derivative of a record's loss by another record's input."""
    x = torch.randn(ROWS, *SHAPE).requires_grad_()
    losses = batch_losses(model, (x, y), weights=weights)
    assert losses.shape == (ROWS,)
    reach = 0.0
    for place in range(ROWS):
        (gradient,) = torch.autograd.grad(losses[place], x, retain_graph=True)
        assert gradient[place].abs().max() > 0
        others = [other for other in range(ROWS) if other != place]
        reach = max(reach, float(gradient[others].abs().max()))
    return reach


def keeps_and_draws(model: nn.Module, y: Tensor) -> list[str]:
    """What a pass over a batch changes beside the result: generators, buffers, attributes."""

    def outside() -> dict[str, str]:
        attributes = {
            name: repr({key: value for key, value in vars(module).items() if key[0] != "_"})
            for name, module in model.named_modules()
        }
        return {
            "torch": repr(torch.get_rng_state().tolist()),
            "numpy": repr(np.random.get_state()),
            "random": repr(random.getstate()),
            "state": repr({name: t.tolist() for name, t in model.state_dict().items()}),
            **attributes,
        }

    x, before = torch.randn(ROWS, *SHAPE), {}
    before = outside()
    batch_losses(model, (x, y)).sum().backward()
    return [name for name, value in outside().items() if before[name] != value]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_no_record_reaches_into_anothers_loss(name: str, loss: str) -> None:
    y, weights = LOSSES[loss]
    assert farthest_reach(made(name), y, weights) == 0.0


@pytest.mark.parametrize("name", MODELS)
def test_models_draw_nothing_and_keep_nothing(name: str) -> None:
    assert keeps_and_draws(made(name).train(), LOSSES["classes"][0]) == []


class Mixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - 1e-3 * x.mean(0)


class Counting(nn.Module):
    seen = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += float(x.sum())
        return x


@pytest.mark.parametrize(
    ("layer", "found"),
    [(Mixed(), None), (nn.Dropout(0.1), "torch"), (nn.BatchNorm2d(1), "state"), (Counting(), "0")],
    ids=["mixed", "dropout", "batch statistics", "attributes"],
)
def test_these_tests_can_fail(layer: nn.Module, found: str | None) -> None:
    model = nn.Sequential(layer, made("softmax"))
    y, _ = LOSSES["classes"]
    if found is None:
        assert farthest_reach(model, y, None) > 0
    else:
        assert found in keeps_and_draws(model, y)


def small_data(seed: int) -> Data:
    chance = np.random.default_rng(seed)
    x = chance.normal(size=(60, 4)).astype(np.float32)
    return Data("made up", x, chance.integers(0, 2, 60), None, None, ("no", "yes"), False)


def test_what_the_loop_does_beside_the_steps_knows_no_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Learning rates, steps that are told and what is said of the run, on other records."""
    rates: list[list[float]] = []

    class Noting(train.PlannedRate):
        def before(self, step: int, clip_norm: float) -> None:
            super().before(step, clip_norm)
            rates[-1].append(step)
            rates[-1].extend(group["lr"] for group in self._optimizer.param_groups)

    monkeypatch.setattr(train, "PlannedRate", Noting)
    plan = DPSGD(clip_norm=1.0).plan(
        n=60, batch_size=20, steps=6, noise_multiplier=2.0, delta=1e-3, neighboring="zero-out"
    )
    how = Optimization(optimizer("sgd"), learning_rate=0.3, averaged=0.5)
    said: list[tuple[Guarantee, tuple[Any, ...], tuple[float, ...], list[int]]] = []
    for seed in (1, 2):
        rates.append([])
        steps: list[int] = []
        torch.manual_seed(0)
        found = train_privately(
            small_data(seed),
            build_model("mlp", (4,), 2),
            plan,
            how,
            ledger=Ledger(neighboring="zero-out"),
            label="a test",
            noise_seed=5,
            on_step=steps.append,
        )
        said.append((found.guarantee, found.basis, found.scores, steps))
    assert said[0] == said[1]
    assert rates[0] == rates[1] != []


def trained(folder: Path, *options: str, code: int = 0) -> dict[str, Any]:
    words = ["train", "--data", "digits", "--epochs", "2", "--no-compare", "--out", str(folder)]
    result = CliRunner().invoke(app, [*words, *options])
    assert result.exit_code == code, result.output
    path = folder / "certificate.json"
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.set_aside("cnn")
@pytest.mark.parametrize("model", ["softmax", "cnn"])
def test_a_certificate_of_the_command_line_leaves_the_program_to_the_package(
    tmp_path: Path, model: str
) -> None:
    document = trained(tmp_path, "--model", model)
    assert document["basis"]["trusted"] == TRUSTED
    assert {**document["versions"], **digests()} == document["versions"]


def test_moved_images_rest_on_a_seed_of_32_bits(tmp_path: Path) -> None:
    document = trained(tmp_path, "--views", "2")
    assert assumptions.SECRET_MOVES.text in document["basis"]["trusted"]
    assert set(TRUSTED) < set(document["basis"]["trusted"])


class TheirMethod(Method):
    """Of another package, as an entry point brings it."""


TheirMethod.__module__ = "their_package.methods"


def test_a_method_of_another_package_is_named() -> None:
    plans = [
        method(clip_norm=1.0).plan(n=60, batch_size=20, steps=6, noise_multiplier=2.0, delta=1e-3)
        for method in (Method, TheirMethod)
    ]
    own, theirs = (assumptions.basis_of_run(plan.basis, small_data(1)) for plan in plans)
    (more,) = {item.text for item in theirs} - {item.text for item in own}
    assert "'their_package'" in more


def test_a_part_that_another_installation_trained_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable[..., None] = interrupted.SavedRun.after_step

    def stopped(self: Any, private: Any, *rest: Any) -> None:
        self.stop.asked = private.steps_done == 3
        original(self, private, *rest)

    with monkeypatch.context() as other:
        other.setattr(interrupted, "digests", lambda: {SOURCES: "0123abcd"})
        other.setattr(interrupted.SavedRun, "after_step", stopped)
        trained(tmp_path, code=130)
    document = trained(tmp_path, "--resume")
    named = [text for text in document["basis"]["trusted"] if "0123abcd" in text]
    assert named == [assumptions.BY_ANOTHER.format("0123abcd")]


def test_a_part_that_an_earlier_version_trained_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file says nothing of the package."""
    original: Callable[..., None] = interrupted.SavedRun.after_step

    def stopped(self: Any, private: Any, *rest: Any) -> None:
        self.stop.asked = private.steps_done == 3
        original(self, private, *rest)

    with monkeypatch.context() as other:
        other.setattr(interrupted.SavedRun, "after_step", stopped)
        trained(tmp_path, code=130)
    path = tmp_path / interrupted.RELEASED.format(3)
    saved = torch.load(path, weights_only=True)
    del saved["packages"]
    torch.save(saved, path)
    document = trained(tmp_path, "--resume")
    assert assumptions.BY_ANOTHER.format("not known") in document["basis"]["trusted"]


def test_the_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    def written(place: str, **files: str) -> str:
        folder = tmp_path / place
        (folder / "__pycache__").mkdir(parents=True)
        (folder / "__pycache__" / "a.pyc").write_text(place)
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        return folder_digest(folder)

    first = written("first", a="1", b="2")
    assert written("same", b="2", a="1") == first
    assert len({first, written("changed", a="1", b="3"), written("renamed", a="1", c="2")}) == 3
