"""What newcomers bring from plain training and from Opacus: each mistake is named with its fix, and
nothing shown has an address in it.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import dpoptim

SAMPLED = dpoptim.DPSGD(clip_norm=1.0).plan(n=40, batch_size=10, steps=4, epsilon=8.0, delta=1e-4)


def in_order(order: Any = "given", epochs: int = 1) -> dpoptim.Plan:
    return dpoptim.DPFTRL(clip_norm=1.0, order=order).plan(
        n=40, batch_size=10, epochs=epochs, noise_multiplier=1.0, delta=1e-4, neighboring="zero-out"
    )


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("read, though refused")


class Loop:
    """The parts of a loop; a mistake changes one of them."""

    def __init__(self) -> None:
        self.plan, self.model = SAMPLED, nn.Linear(3, 2)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data: Any = TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
        self.scaler = torch.amp.GradScaler("cpu")

    def run(
        self, after_backward: Callable[["Loop"], Any] = lambda loop: None, **options: Any
    ) -> None:
        private = dpoptim.attach(self.plan, self.model, self.optimizer, self.data)
        with private:
            for x, y in private.batches(**options):
                losses = F.cross_entropy(self.model(x), y, reduction="none")
                private.backward(losses)
                after_backward(self)
                self.optimizer.step()


def all_frozen(loop: Loop) -> None:
    loop.model.requires_grad_(False)
    loop.run()


def all_frozen_in_check(loop: Loop) -> None:
    loop.model.requires_grad_(False)
    dpoptim.check(loop.model, lambda model, x: model(x).sum(1), torch.randn(4, 3))


def scaled_step(loop: Loop) -> None:
    loop.run(lambda loop: (loop.scaler.scale(torch.ones(1)), loop.scaler.step(loop.optimizer)))


def scaled_loss(loop: Loop, *, by_hand: bool = False) -> None:
    """Refused by the loss already, whoever differentiates it; the scale of another model is not."""
    other = nn.Linear(3, 1)
    with dpoptim.attach(loop.plan, loop.model, loop.optimizer, loop.data) as private:
        for x, y in private.batches():
            loop.scaler.scale(other(x).sum()).backward()
            losses = F.cross_entropy(loop.model(x), y, reduction="none")
            if by_hand:
                loop.scaler.scale(losses.mean()).backward()
            private.backward(loop.scaler.scale(losses))


def scaled_mean(loop: Loop) -> None:
    scaled_loss(loop, by_hand=True)


def ascent(loop: Loop) -> None:
    """The first step of SAM."""
    loop.run(
        lambda loop: torch.stack(
            [p.grad.norm() for p in loop.model.parameters() if p.grad is not None]
        )
    )


def clamped_gradient(loop: Loop) -> None:
    loop.run(lambda loop: loop.model.weight.grad.clamp_(-1, 1))  # type: ignore[operator, union-attr]


def gradient_given_to_torch(loop: Loop) -> None:
    loop.run(lambda loop: torch.linalg.norm(loop.model.weight.grad))  # type: ignore[arg-type]


def clipped_values(loop: Loop) -> None:
    loop.run(lambda loop: nn.utils.clip_grad_value_(loop.model.parameters(), 1.0))


def norm_of_gradient(loop: Loop) -> None:
    loop.run(lambda loop: loop.model.weight.grad.norm())  # type: ignore[operator, union-attr]


def copy_of_gradient(loop: Loop) -> None:
    loop.run(lambda loop: loop.model.weight.grad.detach().clone())  # type: ignore[operator, union-attr]


def weight_times_gradient(loop: Loop) -> None:
    loop.run(lambda loop: loop.model.weight * loop.model.weight.grad)


def weights_assigned(loop: Loop) -> None:
    kept = loop.model.state_dict()
    loop.run(lambda loop: loop.model.load_state_dict(kept, assign=True))


def schedule_of_microbatches(loop: Loop) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)
    loop.run(lambda loop: scheduler.step(), physical_batch_size=2)


def weight_decay_of_microbatches(loop: Loop) -> None:
    def decay(loop: Loop) -> None:
        loop.optimizer.param_groups[0]["weight_decay"] += 0.1

    loop.run(decay, physical_batch_size=2)


def averages_of_microbatches(loop: Loop) -> None:
    """A list of an optimizer of one's own, which is written into."""
    loop.optimizer.param_groups[0]["betas"] = [0.9, 0.99]

    def remember_less(loop: Loop) -> None:
        loop.optimizer.param_groups[0]["betas"][0] *= 0.9

    loop.run(remember_less, physical_batch_size=2)


def rates_of_other_parameters(loop: Loop) -> None:
    loop.optimizer = torch.optim.SGD(
        [{"params": [p], "lr": 0.1 * place} for place, p in enumerate(loop.model.parameters())]
    )

    def swap(loop: Loop) -> None:
        first, second = loop.optimizer.param_groups
        first["params"], second["params"] = second["params"], first["params"]

    loop.run(swap, physical_batch_size=2)


def tuple_of_tensors(loop: Loop) -> None:
    loop.data = loop.data.tensors
    loop.run()


def splits(loop: Loop) -> None:
    loop.data = {"train": loop.data, "test": loop.data}
    loop.run()


class Frame(dict[str, Tensor]):
    """As pandas' tables are looked up: by columns, and by rows only through ``iloc``."""

    iloc = property(lambda self: self)


def table_of_pandas(loop: Loop) -> None:
    loop.data = Frame(x=torch.zeros(4))
    loop.run()


def accumulation_by_accelerate(loop: Loop) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(
        cpu=True, gradient_accumulation_steps=4
    )
    loop.optimizer = accelerator.prepare_optimizer(loop.optimizer)
    try:
        loop.run()
    finally:
        accelerator.gradient_accumulation_steps = 1


def traced(loop: Loop) -> None:
    loop.run(lambda loop: torch.jit.trace(loop.model, torch.randn(2, 3)))  # type: ignore[no-untyped-call]


def scripted(loop: Loop) -> None:
    loop.run(lambda loop: torch.jit.script(loop.model))


def exported(loop: Loop) -> None:
    loop.run(lambda loop: torch.export.export(loop.model, (torch.randn(2, 3),)))


def opacus_model(loop: Loop) -> None:
    loop.model = pytest.importorskip("opacus").GradSampleModule(loop.model)
    loop.run()


def opacus_hooks(loop: Loop) -> None:
    wrapper = pytest.importorskip("opacus").GradSampleModule(loop.model)
    assert wrapper is not None
    loop.run()


def opacus_optimizer(loop: Loop) -> None:
    optimizers = pytest.importorskip("opacus.optimizers")
    loop.optimizer = optimizers.DPOptimizer(
        loop.optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4
    )
    loop.run()


def sampled_stream(loop: Loop) -> None:
    loop.data = Stream()
    loop.run()


def shuffled_stream(loop: Loop) -> None:
    loop.plan, loop.data = in_order("shuffled"), Stream()
    loop.run()


class NotTorchs:
    """As fastai's own ``Optimizer``, which is derived from none of torch's."""


def optimizer_of_another_library(loop: Loop) -> None:
    loop.optimizer = NotTorchs()
    loop.run()


def loader_of_their_own(loop: Loop) -> None:
    private = dpoptim.attach(loop.plan, loop.model, loop.optimizer, loop.data)
    with private:
        for x, y in DataLoader(loop.data, batch_size=10):
            private.backward(F.cross_entropy(loop.model(x), y, reduction="none"))


def loop_over_epochs(loop: Loop) -> None:
    private = dpoptim.attach(loop.plan, loop.model, loop.optimizer, loop.data)
    with private:
        for _ in range(2):
            for x, y in private.batches():
                private.backward(F.cross_entropy(loop.model(x), y, reduction="none"))
                loop.optimizer.step()


def unfrozen_between(loop: Loop) -> None:
    loop.model.requires_grad_(False).bias.requires_grad_(True)  # type: ignore[operator, union-attr]
    private = dpoptim.attach(loop.plan, loop.model, loop.optimizer, loop.data)
    with private:
        pass
    loop.model.requires_grad_(True)
    with private:
        pass


def stream_twice(loop: Loop) -> None:
    loop.plan, loop.data = in_order(epochs=2), Stream()
    loop.run()


MISTAKES: dict[Callable[[Loop], None], str] = {
    all_frozen: r"model has no parameter that requires a gradient.*Fix: requires_grad_",
    all_frozen_in_check: r"model has no parameter that requires a gradient.*Fix: requires_grad_",
    scaled_step: r"GradScaler.*Fix: torch.amp.GradScaler\(enabled=False\)",
    scaled_loss: r"GradScaler.*Fix: torch.amp.GradScaler\(enabled=False\)",
    scaled_mean: r"GradScaler.*Fix: torch.amp.GradScaler\(enabled=False\)",
    ascent: r"norm of an attached.*Fix: train with the optimizer that SAM wraps",
    clamped_gradient: r"\.grad is None.*Fix: look at the noisy mean after",
    gradient_given_to_torch: r"\.grad is None.*Fix: look at the noisy mean after",
    clipped_values: r"there is no \.grad to clip.*Fix: leave it out",
    norm_of_gradient: r"\.grad is None.*Fix: look at the noisy mean after",
    copy_of_gradient: r"\.grad is None.*Fix: look at the noisy mean",
    weights_assigned: r"'weight' was.*another's place.*Fix: .*assign=True\) before",
    weight_times_gradient: r"\.grad is None.*Fix: look at the noisy mean",
    splits: r'train_set is a dict, whose keys.*Fix: .*train_set\["train"\]',
    table_of_pandas: r"train_set is a Frame, of which.*Fix: torch\.utils\.data\.TensorDataset",
    schedule_of_microbatches: r"lr was changed.*Fix: scheduler\.step\(\)",
    weight_decay_of_microbatches: r"weight_decay was changed.*Fix: .*private\.finished_step",
    averages_of_microbatches: r"betas was changed.*Fix: ",
    rates_of_other_parameters: r"params was changed.*Fix: ",
    tuple_of_tensors: r"tuple of tensors.*Fix: torch\.utils\.data\.TensorDataset",
    accumulation_by_accelerate: r"gradient_accumulation_steps=4.*Fix: .*physical_batch_size",
    **dict.fromkeys((traced, scripted, exported), r"Fix: export the model after the `with`"),
    opacus_model: r"Opacus' GradSampleModule.*Fix: attach the bare model",
    opacus_hooks: r"'weight' has Opacus' grad_sample.*Fix: wrapper\.to_standard_module",
    opacus_optimizer: r"Opacus' DPOptimizer.*Fix: give dpoptim\.attach your own",
    optimizer_of_another_library: r"got .*\.NotTorchs\. Fix: .*OptimWrapper",
    loader_of_their_own: r"without a batch.*Fix: .*iterate over private\.batches\(\)",
    loop_over_epochs: r"all 4 planned steps are done.*Fix: .*private\.epochs\(\)",
    unfrozen_between: r"'weight' was unfrozen.*Fix: .*attach again",
    sampled_stream: r"train_set is a stream.*samples records by index.*Fix: dpoptim\.DPFTRL",
    shuffled_stream: r'train_set is a stream.*order="shuffled".*Fix: dpoptim\.DPFTRL',
    stream_twice: r"train_set is a stream.*more than once.*Fix: dpoptim\.DPFTRL",
    lambda loop: loop.run(max_physical_batch_size=4): r"is here physical_batch_size=",
    lambda loop: dpoptim.DPSGD(max_grad_norm=1.0): r"is here clip_norm=",  # type: ignore[call-arg]
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_the_mistake_is_named_with_its_fix(mistake: Callable[[Loop], None]) -> None:
    with pytest.raises(Exception, match=f"(?s){MISTAKES[mistake]}"):
        mistake(Loop())


@pytest.mark.filterwarnings("ignore")
class Wrapper:
    """As fastai's ``OptimWrapper``: no optimizer of torch's, but around one."""

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt = opt

    def step(self) -> None:
        self.opt.step()


@pytest.mark.parametrize("several", [False, True])
def test_an_optimizer_is_found_inside_what_wraps_it(several: bool) -> None:
    loop = Loop()
    loop.optimizer = wrapper = Wrapper(loop.optimizer)
    before = loop.model.weight.detach().clone()  # type: ignore[operator]
    given: Any = [wrapper] if several else wrapper
    with dpoptim.attach(loop.plan, loop.model, given, loop.data) as private:
        for x, y in private.batches():
            private.backward(F.cross_entropy(loop.model(x), y, reduction="none"))
            wrapper.step()
    assert private.steps_done == 4
    assert not torch.equal(before, loop.model.weight)  # type: ignore[arg-type]


def test_epochs_are_slices_of_the_steps() -> None:
    """As the message about an outer loop over epochs, and the guide, say."""
    loop, done = Loop(), []
    with dpoptim.attach(loop.plan, loop.model, loop.optimizer, loop.data) as private:
        steps = private.steps(physical_batch_size=4)
        for _ in range(2):
            for step in itertools.islice(steps, private.plan.steps // 2):
                for x, y in step:
                    private.backward(F.cross_entropy(loop.model(x), y, reduction="none"))
                loop.optimizer.step()
            done.append(private.steps_done)
    assert done == [2, 4]


def test_a_model_that_opacus_has_let_go_is_served() -> None:
    loop = Loop()
    loop.model = pytest.importorskip("opacus").GradSampleModule(loop.model).to_standard_module()
    loop.run()


@pytest.mark.filterwarnings("ignore")
def test_layers_of_opacus_are_modules_as_any_other() -> None:
    loop = Loop()
    loop.model = pytest.importorskip("opacus.layers.dp_rnn").RNNLinear(3, 2)
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loop.run()


@pytest.mark.filterwarnings("ignore")
def test_a_class_derived_from_opacus_wrapper_is_a_wrapper() -> None:
    class Mine(pytest.importorskip("opacus").GradSampleModule):  # type: ignore[misc]
        pass

    loop = Loop()
    loop.model = Mine(loop.model)
    with pytest.raises(dpoptim.PrivacyError, match="Opacus' Mine"):
        loop.run()


class OfTable(Dataset[Any]):
    """Hands on the attributes of the table that it reads."""

    def __init__(self, data: TensorDataset) -> None:
        self.data, self.table = data, Frame(x=torch.zeros(4))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int) -> Any:
        return self.data[place]

    def __getattr__(self, name: str) -> Any:
        if name == "table":
            raise AttributeError(name)
        return getattr(self.table, name)


def test_data_sets_that_hand_on_a_table_are_no_tables() -> None:
    loop = Loop()
    loop.data = OfTable(loop.data)
    loop.run()


class CountsCalls(torch.optim.Optimizer):
    """Keeps its number of calls in its groups, as timm's Lamb and schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data -= p.grad / group["calls"]


@pytest.mark.parametrize("size", [1, 2, 40])
def test_calls_that_an_optimizer_counts_are_those_of_steps(size: int) -> None:
    """They told how many microbatches the first step had, and were refused in the second."""
    loop = Loop()
    loop.optimizer = CountsCalls(loop.model.parameters(), {})
    loop.run(physical_batch_size=size)
    assert loop.optimizer.param_groups[0]["calls"] == loop.plan.steps > 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("when", ["after", "a copy", "a new model"])
def test_models_are_exported_as_the_hint_says(when: str) -> None:
    loop, x, found = Loop(), torch.randn(4, 3), list[Callable[[Tensor], Tensor]]()

    def export(model: nn.Module) -> None:
        if when != "a new model":
            found.append(torch.jit.trace(model, x))  # type: ignore[no-untyped-call]
            found.append(torch.export.export(model, (x,)).module())
        if when != "a copy":
            found.append(torch.jit.script(model))

    with dpoptim.attach(loop.plan, loop.model, loop.optimizer, loop.data) as private:
        for a, b in private.batches():
            private.backward(F.cross_entropy(loop.model(a), b, reduction="none"))
            loop.optimizer.step()
        if when == "a copy":
            export(copy.deepcopy(loop.model).eval())
        if when == "a new model":
            new = nn.Linear(3, 2)
            new.load_state_dict(loop.model.state_dict())
            export(new)
    if when == "after":
        export(loop.model)
    assert found
    for each in found:
        torch.testing.assert_close(each(x), loop.model(x))


def test_other_errors_are_left_as_they_are() -> None:
    def fail(loop: Loop) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        Loop().run(fail)
    assert not getattr(caught.value, "__notes__", None)


def test_nothing_shown_is_an_address() -> None:
    loop = Loop()
    with dpoptim.attach(loop.plan, loop.model, loop.optimizer, loop.data) as private:
        steps = private.steps()
        shown = (private, private.batches(), private.batches(physical_batch_size=3), steps)
        for thing in (*shown, next(steps), private.spent(), loop.plan, loop.plan.event):
            assert " at 0x" not in repr(thing)
            assert "REPLACE_SPECIAL" not in repr(thing)


class Proxies(nn.Module):
    """A loss with weights of its own, as in metric learning."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs @ self.weight, labels, reduction="none")


@pytest.mark.parametrize("checked", [False, True])
def test_a_loss_with_weights_of_its_own_does_not_train_them_unprotected(checked: bool) -> None:
    """They were moved by gradients that nobody clipped, under a certificate for the model."""
    loop, criterion = Loop(), Proxies()
    own = torch.optim.SGD(criterion.parameters(), lr=0.1)
    before = criterion.weight.detach().clone()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return criterion(model(batch[0]), batch[1])

    def run() -> None:
        options: dict[str, Any] = {"loss": loss} if checked else {}
        with dpoptim.attach(loop.plan, loop.model, loop.optimizer, loop.data, **options) as private:
            for batch in private.batches():
                private.backward(loss(loop.model, batch))
                loop.optimizer.step()
                own.step()

    with pytest.raises(dpoptim.PrivacyError, match=r"outside of the model.*Fix: .*ModuleList"):
        run()
    assert torch.equal(before, criterion.weight)
    criterion.requires_grad_(False)
    run()


def test_weights_of_a_loss_that_begins_later_do_not_learn_unprotected() -> None:
    """Only what the first losses depended on was looked at: a term after a warm-up passed by."""
    loop, criterion = Loop(), Proxies()
    begun = 0
    with (
        pytest.raises(dpoptim.PrivacyError, match="outside of the model"),
        dpoptim.attach(loop.plan, loop.model, loop.optimizer, loop.data) as private,
    ):
        for x, y in private.batches():
            outputs = loop.model(x)
            losses = F.cross_entropy(outputs, y, reduction="none")
            private.backward(losses + criterion(outputs, y) if begun else losses)
            loop.optimizer.step()
            begun += 1
    assert begun
    assert criterion.weight.grad is None


def test_a_loss_with_weights_trains_beside_the_model_where_one_module_holds_both() -> None:
    loop, criterion = Loop(), Proxies()
    both = nn.ModuleList([loop.model, criterion])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    before = criterion.weight.detach().clone()

    def loss(both: Any, batch: Any) -> Tensor:
        return both[1](both[0](batch[0]), batch[1])

    with dpoptim.attach(loop.plan, both, optimizer, loop.data, loss=loss) as private:
        for batch in private.batches():
            private.backward(loss(both, batch))
            optimizer.step()
    assert not torch.equal(before, criterion.weight)


class SharpnessAware(torch.optim.SGD):
    """As SAM is usually written: the step of an optimizer inside it, after one up the gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        torch.stack([g.norm() for g in gradients]).norm()
        self.base_optimizer.step()


def test_steps_up_the_gradient_find_none_and_say_so() -> None:
    """They found the noisy mean, and went on without a second gradient: up, and not back."""
    loop = Loop()
    loop.optimizer = SharpnessAware(loop.model.parameters())
    with (
        pytest.raises(RuntimeError) as raised,
        dpoptim.attach(loop.plan, loop.model, loop.optimizer, loop.data) as private,
    ):
        for x, y in private.batches():

            def closure(x: Tensor = x, y: Tensor = y) -> None:
                private.backward(F.cross_entropy(loop.model(x), y, reduction="none"))

            loop.optimizer.step(closure)
    assert ".grad is None" in " ".join(raised.value.__notes__)
