"""PyTorch's private names stand in one file, and what they must do is tested before a record is
touched.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim import attach  # imported before anything is patched
from dpoptim.runtime import dispatch_internals, torch_internals
from dpoptim.runtime.torch_features import FEATURES, require

SOURCE = Path(dpoptim.__file__).parent
PRIVATE = re.compile(
    r"torch\._[a-zA-Z]|torch\.ops\.|torch\.(?:utils|nn|optim|autograd)[\w.]* import "
    r"_|torch\.utils\._|\._version\b"
    r"|distributed_c10d\._|\._get_backend\b|\._device_types\b|options\._timeout"
    r"|queue_callback|_active_ddp_module|_delay_all_reduce"
    r"|\._(?:backward|forward|forward_pre|backward_pre|post_accumulate_grad|optimizer_step_pre|optimizer_step_post)_hooks\b"
)


def test_private_names_stand_in_files_of_their_own() -> None:
    found = {
        str(path.relative_to(SOURCE)): PRIVATE.findall(path.read_text())
        for path in SOURCE.rglob("*.py")
        if not path.name.endswith("_internals.py") and PRIVATE.search(path.read_text())
    }
    assert found == {}
    # else the search proves nothing
    assert PRIVATE.search((SOURCE / "runtime/torch_internals.py").read_text())


def test_this_pytorch_does_what_it_must() -> None:
    require.cache_clear()
    require()
    assert [feature.lost for feature in FEATURES if not feature.works()] == []


def test_wrappers_of_every_kind_are_found_and_no_others() -> None:
    class Wrapper(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, module: torch.nn.Module) -> None:
            torch.nn.Module.__init__(self)  # no process group
            self.module = module

    class Further(Wrapper):
        pass

    class Other(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    mine, another = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    made = [Wrapper(mine), Further(mine), Wrapper(another), Other(mine)]
    found = torch_internals.wrappers_of(mine)
    assert {id(each) for each in found} == {id(each) for each in made[:2]}


BROKEN: dict[str, tuple[Any, str]] = {
    "graph_task": (lambda: 0, "per-sample gradients"),
    "after_backward": (lambda callback: None, "per-sample gradients"),
    "applied": (lambda function, *args: args[0], "per-sample gradients"),
    "autocast_is_on": (lambda: False, "the watch on torch.autocast"),
    "version_of": (lambda tensor: 0, "the watch on weights and buffers"),
    "gradient_hooks": (lambda p: [], "the watch on hooks"),
    "has_hooks": (lambda module: False, "the watch on hooks"),
    "module_hooks": (lambda module: [], "the watch on hooks"),
    "pre_forward_hooks": (lambda module: [], "the watch on hooks"),
    "put_first": (lambda optimizer, handle: None, "the gate ahead of other hooks"),
    "saved_tensors_hooks_are_set": (lambda: False, "value clipping's watch"),
    "is_functorch_tensor": (lambda x: False, "matrix products under torch.func"),
    "pytree": (None, "nested records"),
    "DispatchMode": (None, "measuring memory"),
    "KEY": (torch._C.DispatchKey.PythonTLSSnapshot, "trials of models that draw noise"),
    "BEGIN": ("_nothing_calls_this", "activation checkpointing"),
    "checkpointing_served": (nullcontext, "activation checkpointing"),
    "convolution_backward": (lambda *a: [torch.zeros(())], "normalisation and convolution"),
    "layer_norm_backward": (None, "normalisation and convolution"),
    "group_norm_backward": (lambda *a: [a[1]], "normalisation and convolution"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_lost_is_said_before_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, lost = BROKEN[name]
    of = dispatch_internals if name == "KEY" else torch_internals
    monkeypatch.setattr(of, name, broken)
    require.cache_clear()
    seen: list[int] = []

    class Records(TensorDataset):
        def __getitem__(self, place: int) -> Any:
            seen.append(place)
            return super().__getitem__(place)

    model = torch.nn.Linear(2, 2)
    plan = dpoptim.DPSGD(1.0).plan(n=4, batch_size=2, steps=1, noise_multiplier=1.0, delta=1e-5)
    try:
        with pytest.raises(dpoptim.PrivacyError, match=f"changed inside.*{lost}"):
            attach(
                plan, model, torch.optim.SGD(model.parameters(), lr=0.1), Records(torch.zeros(4, 2))
            )
    finally:
        monkeypatch.undo()
        require.cache_clear()
    assert "forward" not in vars(model)


def test_products_by_onednn_are_right() -> None:
    if not torch_internals.has_onednn():
        pytest.skip("this PyTorch has no products by oneDNN")
    torch.manual_seed(0)
    x, w, bias = torch.randn(5, 3), torch.randn(4, 3), torch.randn(4)
    product: Callable[..., torch.Tensor] = torch_internals.onednn_linear
    torch.testing.assert_close(product(x, w, bias), x @ w.T + bias)
