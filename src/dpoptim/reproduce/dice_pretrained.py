"""Models that a reader brings, fine-tuned as in Zhang et al. 2024, Tables 2 and 3 and Fig. 4.

* A ViT on CIFAR: 3 epochs, batches of 1,000, Adam, clip norms 1 and 0.1, (2, 1e-5)-DP; the best of
  the paper's three rates, on a tenth of the training images, which are not trained on. Images are
  enlarged to the size that the model knows, and the head is new where classes are others.
* GPT-2 on E2E: 10 epochs, batches of 1,000, AdamW from 2e-3, warmed up and then falling, clip norm
  1, (8, 8e-6)-DP. A text is a meaning, two bars, and a sentence, which alone counts for the loss.
  Sentences are written by the most likely tokens; the paper searches more widely.

Without dropout. Data are public; zero-out. Noise as it is proven: the paper's figures for DiceSGD,
which stand beside, are at its own noise, which is too little for the epsilon that they name.
"""

import copy
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.data import Data
from dpoptim.reproduce import dice_cases, dice_vit
from dpoptim.reproduce.dice_cases import PADDING, Case
from dpoptim.reproduce.dice_table import OPEN, Row
from dpoptim.reproduce.dice_texts import Schedule, Score, Texts, arrays, by_meaning
from dpoptim.reproduce.real_cases import tensors_of
from dpoptim.reproduce.user_data import naming_option
from dpoptim.runs.train import accuracy

BATCH = 1000
VIT_RATES, VIT_EPOCHS, VIT_ROWS = (1e-2, 1e-3, 1e-4), 3, 50
GPT_RATE, GPT_EPOCHS, GPT_ROWS = 2e-3, 10, 8
MARK = " ||"  # between meaning and sentence
# of the models that most ViTs come from, where the folder does not say
MEAN = DEVIATION = (0.5, 0.5, 0.5)
TABLE_2 = {
    "CIFAR-10, ViT, C = 1": {"DP-SGD": 0.952, "DiceSGD": 0.974, OPEN: 0.990},
    "CIFAR-10, ViT, C = 0.1": {"DP-SGD": 0.945, "DiceSGD": 0.975, OPEN: 0.990},
    "CIFAR-100, ViT, C = 1": {"DP-SGD": 0.790, "DiceSGD": 0.863, OPEN: 0.920},
    "CIFAR-100, ViT, C = 0.1": {"DP-SGD": 0.789, "DiceSGD": 0.865, OPEN: 0.920},
}
TABLE_3 = {  # without privacy: Hu et al. 2021
    "DP-SGD": {"BLEU": 56.8, "NIST": 4.83, "ROUGE-L": 65.2, "CIDEr": 1.43},
    "DiceSGD": {"BLEU": 62.6, "NIST": 7.05, "ROUGE-L": 66.6, "CIDEr": 1.83},
    OPEN: {"BLEU": 70.4, "NIST": 8.85, "ROUGE-L": 71.8, "CIDEr": 2.53},
}


class OfPixels(nn.Module):
    """A classifier of transformers on images (n, channels, height, width) of pixels in [0, 1].

    Attributes:
        size: height and width that it knows; None: any.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self, model: nn.Module, size: tuple[int, int] | None, mean: Tensor, deviation: Tensor
    ) -> None:
        super().__init__()
        self.model, self.size = model, size
        self.register_buffer("mean", mean.view(-1, 1, 1))
        self.register_buffer("deviation", deviation.view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.size is not None and x.shape[-2:] != self.size:
            x = F.interpolate(x, self.size, mode="bilinear", align_corners=False)
        scores: Tensor = self.model((x - self.mean) / self.deviation).logits
        return scores


class OfNumbers(nn.Module):
    """A language model of transformers on its tokens' numbers plus one; 0 is `PADDING`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        # what stands for padding comes after all that counts, and none attends to what follows it
        scores = self.model(input_ids=(x - 1).clamp(min=0), use_cache=False).logits
        return F.pad(scores, (1, 0), value=-math.inf)


@contextmanager
def loading(folder: Path) -> Iterator[Any]:
    """The module of transformers, quiet; errors name the option.

    Raises:
        ModuleNotFoundError: it is not installed. FileNotFoundError, ValueError: the folder holds
            something else.
    """
    try:
        import transformers
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"{missing}. Fix: pip install 'dpoptim[hf]'.") from missing
    logging = transformers.utils.logging
    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with naming_option("model"):
            if not (folder / "config.json").is_file():
                raise FileNotFoundError(f"{folder} has no config.json")
            yield transformers
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def moved_to_device(device: str, model: nn.Module) -> nn.Module:
    """The model, moved.

    Raises:
        ValueError: there is no such device.
    """
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # the latter of a build without CUDA
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None


def classifier(folder: Path, classes: int) -> OfPixels:
    """The model in a folder, for so many classes."""
    with (
        loading(folder) as transformers,
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(0)  # of a new head
        model = transformers.AutoModelForImageClassification.from_pretrained(
            folder,
            num_labels=classes,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            use_safetensors=True,
        )
        path = folder / "preprocessor_config.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
    size = getattr(model.config, "image_size", None)
    return OfPixels(
        model,
        (size, size) if isinstance(size, int) else size and tuple(size),
        torch.tensor(known.get("image_mean", MEAN)),
        torch.tensor(known.get("image_std", DEVIATION)),
    )


def vit_case(images: Data, folder: Path, device: str) -> Case:
    """Fine-tuning on shuffled images, at the first of the clip norms of `dice_vit`."""
    model = moved_to_device(device, classifier(folder, images.classes))
    x, y, x_test, y_test = (part.to(device) for part in tensors_of(images))
    cut = len(x) - len(x) // 10
    return Case(
        f"{images.name}, ViT",
        "accuracy",
        (x[:cut], y[:cut]),
        (x[cut:], y[cut:]),
        (x_test, y_test),
        lambda: copy.deepcopy(model),
        F.cross_entropy,
        partial(accuracy, rows=VIT_ROWS),
        "Adam",
        batches=(BATCH,),
        epochs=(VIT_EPOCHS,),
        clip_norms=dice_vit.CLIP_NORMS[:1],
        steps=VIT_RATES,
        physical_batch_size=VIT_ROWS,
    )


def in_table_2(row: Row) -> float:
    return TABLE_2.get(row.case, {}).get(row.method, math.nan)


def in_table_3(score: Score) -> float:
    return TABLE_3.get(score.method, {}).get(score.measure, math.nan)


def gpt2_texts(e2e: Path, folder: Path, device: str) -> Texts:
    """E2E's training set, and its test set, by the tokenizer of the model in ``folder``."""
    with naming_option("e2e"):
        training, tests = (
            list(dice_cases.records(e2e / name)) for name in ("trainset.csv", "testset_w_refs.csv")
        )
    with loading(folder) as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, use_safetensors=True
        )
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{folder} has a tokenizer without a token that ends a text")
    placed, end = moved_to_device(device, OfNumbers(model)), tokenizer.eos_token_id + 1

    def numbers(texts: Sequence[str]) -> list[list[int]]:
        found = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [[token + 1 for token in row] for row in found]

    def pairs(records: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        given = numbers([meaning + MARK for meaning, _ in records])
        asked = numbers([f" {sentence}" for _, sentence in records])
        return [(a, [*b, end]) for a, b in zip(given, asked, strict=True)]

    known, held = pairs(training), pairs(tests)
    longest = min(
        max(len(given) + len(asked) for given, asked in (*known, *held)),
        model.config.max_position_embeddings + 1,
    )
    references = by_meaning((meaning, dice_cases.words(text)) for meaning, text in tests)
    (x, y), (x_test, y_test) = (arrays(part, longest) for part in (known, held))
    return Texts(
        (x.to(device), y.to(device)),
        (x_test.to(device), y_test.to(device)),
        numbers([meaning + MARK for meaning in references]),
        list(references.values()),
        placed,
        lambda written: dice_cases.words(tokenizer.decode([token - 1 for token in written])),
        end,
        (PADDING,),
        longest,
        Schedule(BATCH, GPT_EPOCHS, GPT_RATE, GPT_ROWS),
    )
