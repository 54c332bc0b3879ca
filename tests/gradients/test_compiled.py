"""torch.compile of an attached model, and the accelerators' form of convolutions inside the engine."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.layers import convolution
from support import by_engine

ROWS = 8


@pytest.mark.filterwarnings("ignore")  # torch's own, while tracing
def test_a_model_compiled_after_attaching_gives_the_eager_sums() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(ROWS, 7), torch.randint(0, 3, (ROWS,))
    engine = Engine(model, Clipping(0.1), capacity=ROWS)
    engine.attach()
    found = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        engine.deliver(ROWS)
        F.cross_entropy(run(x), y).backward()
        found.append([s.clone() for s in engine.split(engine.take())])
    engine.detach()
    for eager, compiled in zip(*found, strict=True):
        assert float(eager.abs().max()) > 0
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-9)


def test_a_compiled_model_is_refused_with_the_fix() -> None:
    compiled = torch.compile(nn.Linear(5, 3), backend="eager")
    with pytest.raises(PrivacyError, match="attach the module inside the wrapper"):
        Engine(compiled, Clipping(1.0), capacity=ROWS).attach()


def test_convolutions_by_patches_give_the_same_clipped_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.Tanh(), nn.Conv2d(6, 2, 2))
    x, target = torch.randn(ROWS, 4, 9, 9), torch.randn(ROWS)
    by_groups = [s.clone() for s in by_engine(model, x, target, Clipping(0.1), capacity=ROWS)]
    monkeypatch.setattr(convolution, "formed_by_groups", convolution.formed_by_patches)
    by_patches = by_engine(model, x, target, Clipping(0.1), capacity=ROWS)
    for one, other in zip(by_groups, by_patches, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
