"""Models under the hooks of Accelerate's ``device_map``, which move inputs from part to part."""

import contextlib
import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpoptim
from integrations.small_language import (
    Bag,
    Sentences,
    adapted,
    causal,
    classifier,
    collate,
    plan,
)

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from accelerate.hooks import (  # noqa: E402
    AlignDevicesHook,
    CpuOffload,
    add_hook_to_module,
    remove_hook_from_submodules,
)

from dpoptim.gradients.hooks.forwards import OwnForward  # noqa: E402
from dpoptim.integrations.language import losses_from_labels  # noqa: E402

pytestmark = pytest.mark.usefixtures("tried_once")
MODELS: dict[str, tuple[Callable[[], Any], bool]] = {
    "all layers": (causal, True),
    "LoRA": (adapted, True),
    "classifier": (classifier, False),
}


def attached(model: nn.Module, **options: Any) -> tuple[dpoptim.PrivateTraining, Any]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    language_model = "lm_head" in str(model)
    private = dpoptim.attach(
        plan(), model, optimizer, Sentences(language_model=language_model),
        loss=losses_from_labels, collate_fn=collate, noise_seed=5, **options,
    )  # fmt: skip
    return private, optimizer


def trained(model: nn.Module, **options: Any) -> list[Tensor]:
    private, optimizer = attached(model, **options)
    with private:
        for batch in private.batches():
            private.backward(losses_from_labels(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters() if p.requires_grad]


def dispatched(model: nn.Module) -> nn.Module:
    """Hooks around every layer, as ``from_pretrained(device_map="auto")`` sets them."""
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert all("_hf_hook" in vars(m) for m in model.modules() if m._parameters)
    return model


@pytest.mark.set_aside("all layers-None")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("isolation", [None, "alone"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.thinned(2)
def test_hooks_stay_and_change_nothing(kind: str, isolation: str | None) -> None:
    make = MODELS[kind][0]
    options = {} if isolation is None else {"isolation": isolation}
    model = dispatched(make())
    before = [dict(vars(module)) for module in model.modules()]
    ours = trained(model, **options)
    assert all(map(torch.equal, ours, trained(make(), **options)))
    places = ("forward", "_old_forward", "_hf_hook")
    after = [vars(module) for module in model.modules()]
    assert [{k: one.get(k) for k in places} for one in before] == [
        {k: one.get(k) for k in places} for one in after
    ]


class Moves(AlignDevicesHook):
    """Counts what it moves."""

    def __init__(self) -> None:
        super().__init__(execution_device="cpu")
        self.times = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.times += torch.is_grad_enabled()
        return super().pre_forward(module, *args, **kwargs)


# by the name of its class hooks are known that do no more than to move
Moves.__name__ = AlignDevicesHook.__name__


def test_hooks_run_in_training_and_in_copies() -> None:
    model = Bag()
    hook = Moves()
    layer = next(module for module in model.modules() if type(module) is nn.Linear)
    add_hook_to_module(layer, hook)
    private, _ = attached(model)
    with private:
        batch = next(iter(private.batches()))
        before = hook.times
        private.backward(losses_from_labels(model, batch))
        assert hook.times == before + 1
        twin = copy.deepcopy(model).eval()
        with torch.no_grad():
            theirs, ours = twin(**batch).logits, model.eval()(**batch).logits
        assert torch.equal(theirs, ours)


def test_hooks_that_come_later_are_refused() -> None:
    model = Bag()
    layer = next(module for module in model.modules() if type(module) is nn.Linear)
    private, _ = attached(model)
    with (
        pytest.raises(dpoptim.PrivacyError, match=r"forward pass of .* was replaced"),
        private,
    ):
        batches = iter(private.batches())
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
        next(batches)


def test_a_hook_in_anothers_place_is_refused() -> None:
    model = dispatched(Bag())
    layer = next(module for module in model.modules() if type(module) is nn.Linear)
    private, _ = attached(model)
    with pytest.raises(dpoptim.PrivacyError, match=r"forward pass of .* was replaced"), private:
        batches = iter(private.batches())
        layer._hf_hook = Moves()  # type: ignore[assignment]
        next(batches)


@pytest.mark.parametrize("come", [True, False])
def test_layers_are_as_they_were_though_hooks_come_or_go(come: bool) -> None:
    model = Bag() if come else dispatched(Bag())
    x = torch.ones(2, 4, dtype=torch.long)
    before = model.eval()(x, torch.ones(2, 4)).logits
    private, _ = attached(model)
    with contextlib.suppress(dpoptim.PrivacyError), private:
        if come:
            dispatched(model)
        else:
            remove_hook_from_submodules(model)
    ours = [
        each
        for module in model.modules()
        for each in vars(module).values()
        if isinstance(each, OwnForward)
    ]
    assert not ours
    assert torch.equal(model.eval()(x, torch.ones(2, 4)).logits, before)
    assert len(trained(model)) == len([*model.parameters()])


@pytest.mark.parametrize(
    "hook",
    [
        AlignDevicesHook(execution_device="cpu", offload=True, weights_map={}),
        CpuOffload("cpu"),
    ],
    ids=["parameters that come and go", "another hook"],
)
def test_hooks_that_do_more_are_named(hook: Any) -> None:
    model = Bag()
    next(iter(model.children()))._hf_hook = hook
    with pytest.raises(dpoptim.PrivacyError, match=r"does more than to move inputs.*Fix: "):
        attached(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_goes_by_rules(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    transformers.set_seed(0)
    causal().save_pretrained(tmp_path)
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, llm_int8_threshold=0.0
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=how, device_map={"": "cpu"}
    )
    kinds = {type(module).__name__ for module in base.modules()}
    assert kinds & {"Linear4bit", "Linear8bitLt"}
    model = peft.get_peft_model(
        peft.prepare_model_for_kbit_training(base), peft.LoraConfig(target_modules=["c_attn"])
    )
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("error", dpoptim.IsolationWarning)
        after = trained(model)
    assert not all(map(torch.equal, before, after))
