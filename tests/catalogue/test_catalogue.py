"""At least 120 architectures, with tuple and dict records: each gives every record its own
gradient, in one way or another.

Batches have as many records as no axis of a record has, and, once for each architecture, as many
as each. What is refused couples records by definition.
"""

import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from checking import TOLERANCE, ByName, InOrder, Records, way_and_deviation
from networks import NETWORKS, Shape, T

import dpoptim
from dpoptim.training.trials.isolation import choose_isolation

try:
    from language import ADAPTERS, TRANSFORMERS
except pytest.skip.Exception:  # transformers or peft is not installed
    ADAPTERS, TRANSFORMERS = {}, {}

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
# Their experts multiply in groups, in float32 alone.
NARROW = {"mixtral", "qwen2 moe", "gpt oss"}
LONG = {"deep lstm both ways", "transformer", "time-first transformer"}  # to try
# What is fast: layers' own rules, and nothing else.
BY_RULES = {
    *(
        "mlp",
        "cnn",
        "u-net",
        "lstm",
        "char rnn",
        "attention",
        "encoder",
        "transformer",
        "tied head",
        "vae",
        "diffusion",
    ),
    *(
        "frozen batch norm",
        "positions of one row",
        "bag of words",
        "lstm turned inside",
        "clip, each record by itself",
    ),
    *(
        "relative position bias",
        "positions of one axis",
        "positions repeated",
        "records folded into positions",
        "tokens folded into what is returned",
        "frames of a video folded into records",
        "windows folded into records",
        "a table read outside of its layer",
        "a table changed where it is read",
    ),
    *(
        "tied autoencoder",
        "queries repeated beside zeros",
        "weights clamped where they are read",
        "slot attention",
        "pointer network",
        "conditional random field",
        "positions in an einsum",
        "attention by torch's function",
        "categories in a table of floats",
        "text in images, positions first",
        "frames folded into records, and transposed convolution",
    ),
    *("time-first lstm", "time-first encoder", "time-first transformer"),
    *(
        "prompt",
        "prompt encoder",
        "t5",
        "mpnet",
        "opt",
        "beit",
        "beit with a shared bias",
        "longformer",
        "patchtst",
        "mamba",
        "mamba2",
        "lstm cell",
        "gru cell",
        "positions in a layer of their own",
        "a router of tokens in a row",
    ),
    *(
        "bert",
        "roberta",
        "gpt2",
        "llama",
        "qwen2",
        "gemma2",
        "bart",
        "vit",
        "dinov2",
        "convnext",
        "lora",
        "ia3",
        *("deberta", "deberta v2", "deberta v3", "lora on deberta v2", "swin", "swin v2"),
    ),
}
# The rest of these goes by rules.
IN_PART = {"experts beside a convolution's weight": ("e",)}
# Their layers are another one's here, in another size or order.
ALIKE = {
    *("bert classifier", "roberta", "distilbert", "electra", "deberta v2", "mistral", "qwen2"),
    *("deberta v2 with its own head", "deberta v3 with its own head", "phi", "gptj", "gpt neox"),
    *("deit", "dinov2", "clip's vision tower", "swin", "beit", "mamba", "qwen2 moe"),
    *("lokr", "vera", "hra", "adalora"),
}


# What each of these adds to a model is in another one here, or in a network: `make test-all` runs
# them.
OTHERS_STAND_FOR = (
    *(
        "bart",
        "bert",
        "opt",
        "mpnet",
        "gpt neo",
        "gpt oss",
        "gemma2",
        "xlnet",
        "funnel",
        "patchtst",
    ),
    *("deberta v3", "deberta with its own head", "lora on deberta v2", "beit with a shared bias"),
    *("loha", "dora", "fourier", "oft", "bits of a head", "layer norms", "prompt encoder"),
    "mobilevit, frozen batch norm",
    "swin v2",
)


def cases(names: Iterable[str], also: Collection[str] = ()) -> list[Any]:
    """All names; those of `ALIKE`, and ``also`` some, for `make test-all`."""
    return [
        pytest.param(name, marks=[pytest.mark.variants] * (name in ALIKE or name in also))
        for name in names
    ]


def record_of(shape: Shape | int) -> Tensor:
    return torch.randint(0, shape, (T,)) if isinstance(shape, int) else torch.randn(*shape)


def test_there_are_enough_of_them() -> None:
    assert len(NETWORKS) >= 80
    if TRANSFORMERS:
        count = len(NETWORKS) + len(TRANSFORMERS) + len(ADAPTERS)
        assert count >= 120
        limits = (Path(__file__).parents[2] / "docs/limits.md").read_text()
        assert f"Tested on {count} architectures, with records as tuples and as dict" in limits
        assert {*NETWORKS, *TRANSFORMERS, *ADAPTERS} >= BY_RULES | ALIKE


def holds(
    name: str, build: Callable[[], nn.Module], record: Callable[[], Any], *, again: bool = False
) -> None:
    """``again``: the same architecture, whose records come otherwise."""
    isolation, deviation = way_and_deviation(
        build, record, wide=name not in NARROW, like_axes=not again
    )
    assert deviation < (1e-3 if name in NARROW else TOLERANCE)
    if name in BY_RULES:
        assert not isolation.alone
        assert not isolation.by_vmap
    if name in IN_PART:
        assert tuple(part.removeprefix("model.") for part in isolation.by_vmap) == IN_PART[name]


@pytest.mark.set_aside("deep lstm both ways", "time-first transformer")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in NETWORKS],
)
def test_networks_with_tuple_records(name: str) -> None:
    build, shape = NETWORKS[name]
    holds(name, build, lambda: (record_of(shape), torch.tensor(1)))


@pytest.mark.one_in(4, first=1)
@pytest.mark.slow
@pytest.mark.parametrize("name", cases(NETWORKS, also=[*NETWORKS][::2]))
def test_networks_with_dict_records(name: str) -> None:
    build, shape = NETWORKS[name]
    holds(name, lambda: ByName(build()), lambda: {"x": record_of(shape), "label": 1}, again=True)


@pytest.mark.set_aside(*OTHERS_STAND_FOR if TRANSFORMERS else ())
@pytest.mark.slow
@pytest.mark.parametrize("name", cases([*TRANSFORMERS, *ADAPTERS]))
def test_language_and_vision_with_dict_records(name: str) -> None:
    build, record = (TRANSFORMERS | ADAPTERS)[name]
    holds(name, build, record)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", cases([*TRANSFORMERS, *ADAPTERS][::4], also=[*TRANSFORMERS][::8]))
def test_language_and_vision_with_tuple_records(name: str) -> None:
    build, record = (TRANSFORMERS | ADAPTERS)[name]
    names = tuple(record())
    holds(name, lambda: InOrder(build(), names), lambda: tuple(record().values()), again=True)


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False), nn.SyncBatchNorm(6), nn.LazyBatchNorm1d()],
)
def test_batch_normalisation_is_refused(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 2))
    for choice in ("auto", "rules", "vmap", "alone"):
        with pytest.raises(dpoptim.PrivacyError, match=r"BatchNorm.*replace_batchnorm"):
            choose_isolation(model, Records(lambda: (torch.randn(6), 1)), choice)


def test_a_contrastive_loss_is_refused() -> None:
    def contrastive(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        a, b = (F.normalize(model(part), dim=-1) for part in batch)
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))

    with pytest.raises(dpoptim.SamplesInteractError, match="contrastive"):
        dpoptim.check(nn.Linear(6, 4), contrastive, (torch.randn(5, 6), torch.randn(5, 6)))
