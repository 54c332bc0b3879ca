"""Other libraries' mixed precision, and their loss scales: the weights of a plain loop without."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import dpoptim
from integrations.small_language import RECORDS, Bag, Sentences, classifier, collate, plan

transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning.pytorch")
accelerate = pytest.importorskip("accelerate")

from dpoptim.integrations.language import losses_from_labels  # noqa: E402
from dpoptim.integrations.lightning import PrivateCallback  # noqa: E402
from dpoptim.integrations.transformers import PrivateTrainer  # noqa: E402

HALF = torch.float16


def released(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def plain(dtype: torch.dtype | None, make: Callable[[], Any] = Bag) -> list[torch.Tensor]:
    """A plain loop under autocast, with the lines of a scaler that is switched off."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    private = dpoptim.attach(
        plan(), model, optimizer, Sentences(), loss=losses_from_labels, collate_fn=collate,
        noise_seed=5,
    )  # fmt: skip
    with private:
        for batch in private.batches():
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                losses = losses_from_labels(model, batch)
            private.backward(scaler.scale(losses))
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return released(model)


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class OnPretendedGPU(PrivateTrainer):
    """As on a GPU: on the CPU Accelerate takes ``fp16`` for float32."""

    scaled = False

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.scaled = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu")
        self.accelerator.native_amp = True
        self.accelerator.state._mixed_precision = "fp16"


@pytest.mark.filterwarnings("ignore")
def test_trainers_need_no_scale(tmp_path: Path) -> None:
    model = Bag()
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=64, learning_rate=0.5, fp16=True,
        lr_scheduler_type="constant", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = OnPretendedGPU(
        model, args, train_dataset=Sentences(), data_collator=collate, plan=plan(), noise_seed=5,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.5), None),
    )  # fmt: skip
    try:
        trainer.train()
    finally:
        trainer.accelerator.state._mixed_precision = "no"
    assert trainer.scaled
    assert not trainer.accelerator.scaler.is_enabled()
    narrow = plain(HALF)
    assert same(released(model), narrow)
    assert not same(narrow, plain(None))


class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, index: int) -> Any:
        return losses_from_labels(self.model, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.filterwarnings("ignore")
def test_lightning_needs_no_scale(tmp_path: Path) -> None:
    plugin = lightning.plugins.MixedPrecision("16-mixed", "cpu")
    scaler = plugin.scaler
    assert scaler is not None
    callback = PrivateCallback(plan(), Sentences(), collate_fn=collate, noise_seed=5)
    module = Module(Bag())
    fit = lightning.Trainer(
        accelerator="cpu", plugins=[plugin], callbacks=[callback], default_root_dir=tmp_path,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    fit.fit(module, callback.loader)
    assert same(released(module), plain(HALF))
    assert plugin.scaler is scaler


@contextmanager
def accelerator_in(precision: str) -> Iterator[Any]:
    """As on a GPU: its state is one a process, and takes ``fp16`` for float32 on the CPU."""
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.native_amp, accelerator.state._mixed_precision = True, precision
    if precision == "fp16":
        accelerator.scaler = torch.amp.GradScaler("cpu")
    try:
        yield accelerator
    finally:
        accelerator.state._mixed_precision = "no"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checked", [True, False], ids=["loss given", "no loss given"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.thinned(2)
def test_accelerators_mixed_precision_goes_by_rules(precision: str, checked: bool) -> None:
    make = Bag if checked else classifier  # a transformer, where its loss is not tried
    model = make()
    with accelerator_in(precision) as accelerator:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        with warnings.catch_warnings():
            warnings.simplefilter("error", dpoptim.IsolationWarning)
            private = dpoptim.attach(
                plan(), model, optimizer, Sentences(), collate_fn=collate, noise_seed=5,
                loss=losses_from_labels if checked else None,
            )  # fmt: skip
        with private:
            for batch in private.batches():
                private.backward(losses_from_labels(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    assert same(released(model), plain(HALF if precision == "fp16" else torch.bfloat16, make))


class Mixes(torch.nn.Module):
    """Adds a little of all records to each."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.layer, self.share = torch.nn.Linear(4, 2), share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(x)
        return outputs + self.share * outputs.mean(0)


@pytest.mark.parametrize("share", [1e-3, 1.0])
def test_what_mixed_precision_would_round_away_is_seen(share: float) -> None:
    with accelerator_in("bf16") as accelerator:
        model = accelerator.prepare(Mixes(share))
    data = torch.utils.data.TensorDataset(torch.randn(RECORDS, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(dpoptim.SamplesInteractError, match="records are mixed"):
        dpoptim.attach(plan(), model, optimizer, data)


def test_a_model_of_one_layer_runs_in_mixed_precision() -> None:
    """A rule is of the layer's own forward pass, in which it would run without."""
    data = torch.utils.data.TensorDataset(torch.randn(RECORDS, 4), torch.randint(2, (RECORDS,)))

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    found = []
    for isolation, precision in (("auto", "bf16"), ("alone", "bf16"), ("auto", "no")):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        with accelerator_in(precision) as accelerator:
            accelerator.native_amp = precision != "no"
            model = accelerator.prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with (
            warnings.catch_warnings(action="ignore"),
            dpoptim.attach(
                plan(), model, optimizer, data, loss=loss, noise_seed=5, isolation=isolation
            ) as private,
        ):
            for batch in private.batches():
                private.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
        found.append(released(model))
    ours, alone, exact = (torch.cat([p.flatten() for p in each]) for each in found)
    assert torch.allclose(ours, alone, atol=1e-3)
    assert not torch.allclose(ours, exact, atol=1e-6)
