"""`torch_compile=True` in a Trainer: batches of all sizes share graphs, and train as without it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpoptim
from integrations.small_language import VOCABULARY, Sentences, collate

transformers = pytest.importorskip("transformers")
import dpoptim.integrations.transformers as integration  # noqa: E402

STEPS, LONGEST = 7, 8


class Classifier(nn.Module):
    """Has what a compiler may fuse between two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.into = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 5)
        self.out = nn.Linear(5, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        h = self.into(self.tokens(input_ids)) * attention_mask[..., None]
        out: Tensor = self.out((0.5 * h * (1 + torch.tanh(h + 0.04 * h * h * h))).sum(1))
        return out


def losses(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(**inputs), inputs["labels"], reduction="none")


def padded(records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """To the longest that there can be, as ``padding="max_length"`` does."""
    batch = collate(records)
    more = (0, LONGEST - batch["input_ids"].shape[1])
    return {key: value if key == "labels" else F.pad(value, more) for key, value in batch.items()}


@pytest.fixture
def compiler() -> Iterator[Any]:
    """What the compiler counts; one that remembers nothing from before."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield counters
    torch.compiler.reset()


def trained(folder: Path, counters: Any, **options: Any) -> tuple[Tensor, list[int], set[int]]:
    """Trained weights; how many graphs there were after each step; rows of batches.

    Args:
        counters: the compiler's; None: it is not compiled.
    """
    graphs: list[int] = []
    rows: set[int] = set()
    compiles = {"torch_compile": True, "torch_compile_backend": "eager"}

    class Count(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            graphs.append(0 if counters is None else counters["stats"]["unique_graphs"])

    class Trainer(integration.PrivateTrainer):
        def per_sample_losses(self, model: nn.Module, inputs: Any) -> Tensor:
            if self.private is not None:
                rows.add(len(inputs["labels"]))
            return super().per_sample_losses(model, inputs)

    model = Classifier()
    Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=64, report_to=[],
            disable_tqdm=True, use_cpu=True, save_strategy="no", remove_unused_columns=False,
            **({} if counters is None else compiles),
        ),
        train_dataset=Sentences(),
        data_collator=padded,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.5), None),
        plan=dpoptim.DPSGD(clip_norm=1.0).plan(
            n=48, batch_size=12, steps=STEPS, noise_multiplier=0.5, delta=1e-3
        ),
        losses=losses,
        noise_seed=5,
        callbacks=[Count()],
        **options,
    ).train()  # fmt: skip
    return torch.cat([p.detach().flatten() for p in model.parameters()]), graphs, rows


@pytest.mark.set_aside("None")
@pytest.mark.filterwarnings("ignore")  # torch's own, while tracing
@pytest.mark.parametrize("fixed_shape", [None, True])
def test_nothing_is_compiled_after_the_first_step(
    fixed_shape: bool | None, tmp_path: Path, compiler: Any
) -> None:
    expected, _, _ = trained(tmp_path, None, fixed_shape=fixed_shape)
    found, graphs, rows = trained(tmp_path, compiler, fixed_shape=fixed_shape)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert graphs == [graphs[0]] * STEPS
    assert graphs[0] > 0
    assert (len(rows) == 1) == bool(fixed_shape)


@pytest.mark.variants
@pytest.mark.filterwarnings("ignore")  # torch's own, while tracing
def test_left_to_itself_the_compiler_begins_anew_for_the_second_batch(
    tmp_path: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "fit_accelerator", lambda *_: None)
    _, graphs, _ = trained(tmp_path, compiler)
    assert graphs[-1] > graphs[0]
