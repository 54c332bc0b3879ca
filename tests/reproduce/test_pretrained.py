"""A ViT and a GPT-2 that a reader brings, tiny and random, fine-tuned by the commands."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from brought import Labelled, bright_squares, rows_in, run
from dpoptim.reproduce import dice_cases, dice_pretrained, dice_texts, dice_vit, user_data
from dpoptim.reproduce.dice_table import OPEN
from dpoptim.reproduce.text_scores import SCORES

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    """One that has learnt other classes, of images of half the size."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        **SMALL, intermediate_size=32, image_size=16, patch_size=8, num_labels=5
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    said = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.5, 0.25]}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(said))
    return tmp_path / "vit"


def red_or_blue(count: int) -> Labelled:
    x, y = bright_squares(count, count, (3, 32, 32))
    x[range(count), 2 * y] = 220
    return x, y


@pytest.mark.figures
def test_a_vit_on_cifar(
    bench: Callable[[str], ModuleType],
    vit: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Learnt without privacy; proven epsilons; the paper's figures beside."""
    folder = tmp_path / "cifar"
    folder.mkdir()
    bench("whole_images").write_cifar(folder, *(red_or_blue(count) for count in (100, 50)))
    monkeypatch.setattr(user_data, "BY_CLASSES", {2: "CIFAR-10"})
    monkeypatch.setattr(dice_vit, "CLIP_NORMS", (0.1,))
    monkeypatch.setattr(dice_pretrained, "BATCH", 30)
    monkeypatch.setattr(dice_pretrained, "VIT_RATES", (1e-2,))
    run("dice-vit", "--cifar", folder, "--model", vit, "--out", tmp_path)
    rows = rows_in(tmp_path / "dice_vit_cifar_10.csv")
    assert [row["method"] for row in rows] == list(dice_vit.METHODS)
    assert {row["case"] for row in rows} == {"CIFAR-10, ViT, C = 0.1"}
    assert [row["paper"] for row in rows] == ["0.945", "nan", "0.975", "0.99"]
    for row in rows:
        if row["method"] == OPEN:
            assert float(row["score"]) > 0.9
        else:
            assert 1.95 < float(row["proven_epsilon"]) <= 2


def test_the_paper_has_a_figure_for_every_clip_norm() -> None:
    assert list(dice_pretrained.TABLE_2) == [
        f"{data}, ViT, C = {norm:g}"
        for data in user_data.BY_CLASSES.values()
        for norm in dice_vit.CLIP_NORMS
    ]
    assert set(dice_pretrained.TABLE_3) == set(dice_texts.METHODS)
    assert all(set(SCORES) == set(scores) for scores in dice_pretrained.TABLE_3.values())


def test_images_are_brought_to_what_the_model_knows(vit: Path) -> None:
    """Enlarged and normalised as its folder says, by a head for other classes, ever the same."""
    model, again = (dice_pretrained.classifier(vit, 7) for _ in range(2))
    colours = torch.tensor([0.6, 0.7, 0.55])  # a deviation above their mean
    x = colours.view(1, 3, 1, 1).expand(2, 3, 4, 4)
    expected = model.model(torch.ones(2, 3, 16, 16)).logits
    assert expected.shape == (2, 7)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(again(x), expected)
    body = transformers.ViTForImageClassification.from_pretrained(vit).vit.state_dict()
    for name, value in model.model.vit.state_dict().items():
        assert torch.equal(value, body[name])


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """A model and a tokenizer of bytes, without words of more."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([sentence(area) for area in AREAS], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=96, n_embd=16, n_layer=1, n_head=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


AREAS = ("café", "river", "hill")


def sentence(area: str) -> str:
    return f"Blue Spice! It is by the {area}."


@pytest.fixture
def e2e(tmp_path: Path) -> Path:
    folder = tmp_path / "e2e"
    folder.mkdir()
    for name in ("trainset.csv", "testset_w_refs.csv"):
        lines = [f'"name[Blue Spice], area[{area}]",{sentence(area)}' for area in AREAS]
        (folder / name).write_text("\n".join(["mr,ref", *lines * 20]) + "\n", encoding="utf-8")
    return folder


def test_texts_are_read_by_the_models_own_tokens(e2e: Path, gpt2: Path) -> None:
    texts = dice_pretrained.gpt2_texts(e2e, gpt2, "cpu")
    x, following = texts.training
    assert x.shape == following.shape == (60, texts.longest - 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gpt2)
    whole = tokenizer.decode([i - 1 for i in x[0].tolist() if i])
    assert whole.startswith("name[Blue Spice], area[café] || Blue Spice! It is by the café.")
    asked = [i for i in following[0].tolist() if i]
    assert asked[-1] == texts.end
    assert texts.spell(asked[:-1]) == dice_cases.words("blue spice! it is by the café.")
    assert len(texts.meanings) == len(texts.references) == 3
    assert [len(each) for each in texts.references] == [20] * 3
    scores = texts.model(x[:2])
    expected = texts.model.model(input_ids=x[:2] - 1 + (x[:2] == 0)).logits
    torch.testing.assert_close(scores[:, :, 1:], expected)
    assert (scores[:, :, 0] == -math.inf).all()


@pytest.mark.figures
def test_gpt2_on_e2e(
    e2e: Path, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses fall without privacy; scores stand beside the paper's."""
    monkeypatch.setattr(dice_pretrained, "BATCH", 10)
    monkeypatch.setattr(dice_pretrained, "GPT_EPOCHS", 4)
    monkeypatch.setattr(dice_pretrained, "GPT_RATE", 0.02)
    run("dice-table3", "--e2e", e2e, "--model", gpt2, "--out", tmp_path)
    losses = rows_in(tmp_path / "dice_fig4_gpt2.csv")
    assert [(row["method"], row["epoch"]) for row in losses] == [
        (method, str(epoch)) for method in dice_texts.METHODS for epoch in range(1, 5)
    ]
    found = [float(row["loss"]) for row in losses if row["method"] == OPEN]
    assert found[-1] < 0.5 * found[0] < 0.5 * np.log(300)
    scores = rows_in(tmp_path / "dice_table3_gpt2.csv")
    assert [(row["method"], row["measure"]) for row in scores] == [
        (method, measure) for method in dice_texts.METHODS for measure in SCORES
    ]
    assert [float(row["paper"]) for row in scores] == [
        *(56.8, 4.83, 65.2, 1.43),
        *(62.6, 7.05, 66.6, 1.83),
        *(70.4, 8.85, 71.8, 2.53),
    ]
    assert not (tmp_path / "dice_table3.csv").exists()  # which is of the small model


def test_a_folder_of_another_model_is_named(
    e2e: Path, gpt2: Path, vit: Path, bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    folder = tmp_path / "cifar"
    folder.mkdir()
    images = bright_squares(20, 0, (3, 32, 32))
    bench("whole_images").write_cifar(folder, images, images)
    for words in (
        ("dice-vit", "--cifar", folder, "--model", gpt2),
        ("dice-vit", "--cifar", folder, "--model", folder),
        ("dice-table3", "--e2e", e2e, "--model", vit),
    ):
        said = run(*words, "--out", tmp_path, code=2)
        assert "--model: " in said
        assert "Give a folder that save_pretrained" in said
    words = ("dice-table3", "--e2e", e2e, "--model", gpt2, "--device", "abacus")
    assert "--device abacus: " in run(*words, "--out", tmp_path, code=2)
