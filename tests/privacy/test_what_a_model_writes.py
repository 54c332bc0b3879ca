"""Nothing that a forward pass writes leaves with the model, or meets other records: it is found by
value, whoever writes.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torch.utils.hooks import RemovableHandle

import dpoptim
from dpoptim.gradients.watch import model_watch
from dpoptim.gradients.watch.values import Values

N, FEATURES, CLASSES = 40, 6, 3


def data() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(N, FEATURES), torch.randint(0, CLASSES, (N,)))


def train(
    model: nn.Module,
    each: Callable[[Any, Tensor, Tensor, torch.optim.Optimizer], None] | None = None,
) -> None:
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=10, steps=3, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with dpoptim.attach(plan, model, optimizer, data()) as private:
        for x, y in private.batches():
            if each is not None:
                each(private, x, y, optimizer)
                continue
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()


class Writer(nn.Module):
    """Writes a record's features down while it is trained, in one of many ways."""

    def __init__(self, write: Callable[["Writer", Tensor], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("book", torch.zeros(4, FEATURES))
        self.register_buffer("hidden", torch.zeros(FEATURES), persistent=False)
        self.frozen = nn.Parameter(torch.zeros(4, FEATURES), requires_grad=False)
        self.write, self.kept = write, torch.zeros(FEATURES)

    def get_extra_state(self) -> Any:
        return {"kept": self.kept}

    def set_extra_state(self, state: Any) -> None:
        self.kept = state["kept"]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.write(self, x.detach())
        return self.layer(x)


def into_the_book(m: Writer, x: Tensor) -> None:
    m.book.data[0] = x[0]


def by_copy(m: Writer, x: Tensor) -> None:
    m.book.data.copy_(x[:1].expand(4, -1))


def by_new_memory(m: Writer, x: Tensor) -> None:
    m.book.data = x[:1].repeat(4, 1)


def by_another_buffer(m: Writer, x: Tensor) -> None:
    m.book = x[:1].repeat(4, 1)


def into_what_is_not_saved(m: Writer, x: Tensor) -> None:
    m.hidden.data.copy_(x[0])


def into_frozen(m: Writer, x: Tensor) -> None:
    m.frozen.data[1] = x[0]


def into_weights(m: Writer, x: Tensor) -> None:
    m.layer.weight.data[0] = x[0]


def into_a_bias(m: Writer, x: Tensor) -> None:
    m.layer.bias.data = x[0, :CLASSES].clone()


def into_extra_state(m: Writer, x: Tensor) -> None:
    m.kept = x[0].clone()


def into_a_new_buffer(m: Writer, x: Tensor) -> None:
    m.register_buffer("late", x[0].clone())


WAYS = [
    into_the_book,
    by_copy,
    by_new_memory,
    by_another_buffer,
    into_what_is_not_saved,
    into_frozen,
    into_weights,
    into_a_bias,
    into_extra_state,
    into_a_new_buffer,
]


@pytest.mark.parametrize("write", WAYS, ids=lambda write: write.__name__)
def test_no_way_of_writing_passes_a_release(write: Callable[[Writer, Tensor], None]) -> None:
    """A VQ code book released a record to 5e-7 under epsilon = 1: `_version` does not see writes
    through ``.data``.
    """
    model = Writer(write).eval()  # made-up records are not written: attaching passes

    def each(private: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        model.train()
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        before = model.layer.weight.detach().clone()
        with pytest.raises(dpoptim.PrivacyError, match="was changed"):
            optimizer.step()
        assert torch.equal(model.layer.weight, before)  # nothing was released
        assert private.steps_done == 0
        raise StopIteration

    with pytest.raises(StopIteration):
        train(model, each)


@pytest.mark.parametrize("write", WAYS, ids=lambda write: write.__name__)
def test_no_way_of_writing_passes_the_end(write: Callable[[Writer, Tensor], None]) -> None:
    """After the last step a look at the model, in training mode: what it writes leaves with the
    state dict.
    """
    model = Writer(write).eval()

    def each(private: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        if private.steps_done == 3:
            model.train()
            with torch.no_grad():
                model(x)

    with pytest.raises(dpoptim.PrivacyError, match="was changed"):
        train(model, each)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("write", [w for w in WAYS if w is not into_extra_state])
def test_records_that_attaching_tries_stay_nowhere(write: Callable[[Writer, Tensor], None]) -> None:
    """Of a model that writes down none but the data set's, whether it is refused or served.

    It tells them by numpy: made-up records have the numbers that torch's operators look for.
    """

    def marked(m: Writer, x: Tensor) -> None:
        if (x[0, 1:].detach().numpy() == 0.5).all():
            write(m, x)

    model, x = Writer(marked), torch.full((N, FEATURES), 0.5)
    before = {name: (id(t), t.clone()) for name, t in everything(model)}
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=10, steps=3, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    records = TensorDataset(x, torch.randint(0, CLASSES, (N,)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    with contextlib.suppress(dpoptim.PrivacyError):
        dpoptim.attach(plan, model, optimizer, records, loss=loss).detach()
    assert {name: id(t) for name, t in everything(model)} == {n: i for n, (i, _) in before.items()}
    assert all(torch.equal(t, before[name][1]) for name, t in everything(model))


def everything(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_buffers(), *model.named_parameters()]


class ActNorm(nn.Module):
    """Initialises its scale by the first batch that it sees, before any gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.zeros(FEATURES)), nn.Linear(FEATURES, CLASSES)
        self.ready = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.shift.data.copy_(-x.detach().mean(0))
            self.ready = True
        return self.layer(x + self.shift)


def test_initialising_by_the_first_batch_is_found() -> None:
    """A pass under no_grad, before the first one with gradients: the batch's mean left exactly."""
    model = ActNorm()

    def each(private: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        model.ready = private.steps_done > 0
        with torch.no_grad():
            model(x)
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()

    with pytest.raises(
        dpoptim.PrivacyError, match="'shift' was changed between the delivery of a batch"
    ):
        train(model, each)


def test_parameters_are_the_callers_between_batches() -> None:
    model = nn.Linear(FEATURES, CLASSES)

    def each(private: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        model.weight.data.clamp_(-0.01, 0.01)
        model.bias.data = torch.zeros(CLASSES)

    train(model, each)


def by_hand(hooks: dict[int, Any]) -> RemovableHandle:
    """Hang up a hook of whose number PyTorch does not know."""
    handle = RemovableHandle(hooks)
    RemovableHandle.next_id -= 1
    hooks[handle.id] = lambda m, x, out: out - out.mean(0)
    return handle


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "backward": lambda m: m.register_full_backward_hook(
        lambda m, gi, go: tuple(g and g.mean(0, keepdim=True) for g in gi)
    ),
    "backward before": lambda m: m.register_full_backward_pre_hook(
        lambda m, go: (go[0] - go[0].mean(0),)
    ),
    "forward": lambda m: m.register_forward_hook(lambda m, x, out: out - out.mean(0)),
    "forward before": lambda m: m.register_forward_pre_hook(
        lambda m, x: (x[0] - x[0].mean(0),), prepend=True
    ),
    "written by hand": lambda m: by_hand(m._forward_hooks),
    "everywhere": lambda m: nn.modules.module.register_module_forward_hook(lambda m, x, out: out),
    "gradient": lambda m: m.weight.register_hook(lambda g: g),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_that_come_after_attaching_are_refused(kind: str) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES))
    handles: list[Any] = []

    def each(private: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        handles.append(HOOKS[kind](model[0]))
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()

    try:
        with pytest.raises(dpoptim.PrivacyError, match="hook was registered"):
            train(model, each)
    finally:
        for handle in handles:
            handle.remove()


def test_a_forward_pass_that_is_replaced_later_is_refused() -> None:
    model = nn.Linear(FEATURES, CLASSES)
    inner = nn.Sequential(model)

    def each(private: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        inner.forward = lambda x: model(x - x.mean(0))  # type: ignore[method-assign,assignment]
        private.backward(F.cross_entropy(inner(x), y, reduction="none"))
        optimizer.step()

    with pytest.raises(dpoptim.PrivacyError, match="forward pass of the model was replaced"):
        train(inner, each)


class Centred(nn.Tanh):
    """Mixes records, and has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize("by", ["another", "another class", "none"])
def test_a_part_without_parameters_that_is_replaced_later_is_refused(by: str) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))

    def each(private: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        if by == "another":
            model[1] = Centred()
        elif by == "another class":
            model[1].__class__ = Centred
        else:
            del model[1]
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()

    with pytest.raises(dpoptim.PrivacyError, match="module '1' was replaced after attaching"):
        train(model, each)


def test_large_frozen_parameters_are_read_in_turn_and_all_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_watch, "READ_AT_ONCE", 1)
    model = nn.Sequential(
        *(nn.Linear(FEATURES, FEATURES).requires_grad_(False) for _ in range(8)),
        nn.Linear(FEATURES, 3),
    )
    reads: list[str] = []
    honest = Values.changed

    def counted(self: Values) -> str | None:
        reads.extend(name for name, _ in self.tensors)
        return honest(self)

    monkeypatch.setattr(Values, "changed", counted)

    def each(private: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        assert any("in turn" in item.text for item in private.basis)
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        reads.clear()
        optimizer.step()
        assert 0 < len({name for name in reads if not name.startswith("8.")}) < 16
        if private.steps_done == 3:
            model[5].weight.data[0, 0] += 1e-6  # type: ignore[union-attr,operator]

    with pytest.raises(dpoptim.PrivacyError, match="frozen parameter '5.weight' was changed"):
        train(model, each)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("shape", [(), (3,), (7, 5), (33, 1021), (2, 3, 4, 5), (20_001,)])
def test_values_see_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    base = (torch.randn(shape) * 10).to(dtype)
    layouts = [base, base.clone().T.contiguous().T if base.dim() == 2 else base.clone()]
    if base.dim() == 4:
        layouts.append(base.clone(memory_format=torch.channels_last))
    if base.dim() == 1:
        layouts.append(torch.cat([base[:1], base])[1:])  # not aligned
    for t in layouts:
        values = Values([("t", t)])
        assert values.changed() is None
        flat = (
            t.reshape(-1)
            if t.is_contiguous()
            else t.T.reshape(-1)
            if t.dim() == 2
            else t.permute(0, 2, 3, 1).reshape(-1)
        )
        raw = flat.view(torch.uint8)
        for place in {0, len(raw) // 2, len(raw) - 1}:
            if raw.data_ptr() != t.data_ptr():
                break
            raw[place] ^= 1
            assert values.changed() == "t"
            raw[place] ^= 1
            assert values.changed() is None


GAPS: dict[str, tuple[Tensor, Callable[[Tensor], Any]]] = {
    "a column": (torch.zeros(3, 4)[:, 1], lambda t: t[2].fill_(1)),
    "repeated": (torch.zeros(3, dtype=torch.bfloat16).expand(2, 3), lambda t: t[0].fill_(1)),
    "sparse": (torch.eye(3).to_sparse(), lambda t: t._values()[0].fill_(2)),
}


@pytest.mark.parametrize("kind", GAPS)
def test_values_that_are_not_in_one_piece_are_compared_by_what_they_are(kind: str) -> None:
    t, write = GAPS[kind]
    values = Values([("t", t)])
    copies = []
    for _ in range(3):
        copies.append(t.clone())  # so that others take other places in memory
        assert values.changed() is None
    write(t)
    assert values.changed() == "t"


def test_a_model_may_have_a_buffer_with_gaps() -> None:
    class Tabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES)
            self.register_buffer("table", torch.randn(CLASSES, 3)[:, 1])

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.table

    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=10, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    model = Tabled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, optimizer, data()) as private:
        for x, y in private.batches():
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()


def test_values_see_rows_that_change_places() -> None:
    book = torch.randn(5_000, 64)
    values = Values([("book", book)])
    book.copy_(book[torch.randperm(5_000)])
    assert values.changed() == "book"
    values.note()
    assert values.changed() is None


@dataclass
class Notes:
    last: Tensor | None = None


class Slotted:
    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = 0.0


def hidden_statistics(keeper: list[nn.Module], x: Tensor) -> None:
    keeper[0](x)


def one_entry(keeper: Any, x: Tensor) -> None:
    keeper[0] = float(x[0, 0])


def one_entry_of_3(keeper: Any, x: Tensor) -> None:
    keeper.data[1] = float(x[0, 0])


KEEPERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], None]]] = {
    "tensor": (lambda: torch.zeros(FEATURES), lambda kept, x: kept.data.copy_(x[0])),
    "list": (list, lambda kept, x: kept.append(x[0])),
    "full deque": (
        lambda: deque([torch.zeros(FEATURES)] * 2, maxlen=2),
        lambda kept, x: kept.append(x[0]),
    ),
    "dictionary of lists": (
        lambda: {"seen": [torch.zeros(FEATURES)]},
        lambda kept, x: kept["seen"][0].data.copy_(x[0]),
    ),
    "set": (set, lambda kept, x: kept.add(float(x[0, 0]))),
    "data class": (Notes, lambda kept, x: setattr(kept, "last", x[0])),
    "slots": (Slotted, lambda kept, x: setattr(kept, "last", float(x[0, 0]))),
    "numbers": (lambda: [0.0], one_entry),
    "array": (lambda: np.zeros(1), one_entry),
    "array backwards": (lambda: np.zeros(3)[::-1], one_entry),
    "array of a type that torch lacks": (lambda: np.zeros(2, np.longdouble), one_entry),
    "array of another order of bytes": (lambda: np.zeros(2, ">f4"), one_entry),
    "masked array": (lambda: np.ma.masked_array(np.zeros(3), [True, False, True]), one_entry_of_3),
    "array of a subclass": (lambda: np.zeros(2).view(np.recarray), one_entry),
    "array with gaps": (lambda: np.zeros((3, 4))[::2, 1], one_entry),
    "array for reading": (
        lambda: [np.broadcast_to(np.zeros(2), (3, 2))],
        lambda kept, x: kept.__setitem__(0, x.numpy().copy()),
    ),
    "array of objects": (lambda: np.zeros(1, dtype=object), one_entry),
    "large tensor": (lambda: torch.zeros(1 << 25), lambda kept, x: kept.data[:1].copy_(x[0, :1])),
    "unregistered module": (lambda: [nn.BatchNorm1d(FEATURES)], hidden_statistics),
    "more than is looked at": (lambda: list(range(100_000)), lambda kept, x: None),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("kind", KEEPERS)
def test_what_plain_attributes_hold_is_named_where_it_changes(kind: str, writes: bool) -> None:
    """A code book that is neither parameter nor buffer may hold a record verbatim."""
    build, write = KEEPERS[kind]

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(FEATURES, CLASSES), build()
            self.alias = {"weight": [self.layer.weight]}  # a parameter: training changes it

        def forward(self, x: Tensor) -> Tensor:
            if writes and self.training:
                write(self.kept, x.detach())
            return self.layer(x)

    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=10, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    model = Keeps().eval()  # made-up records are not written
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, optimizer, data()) as private:
        model.train()
        for x, y in private.batches():
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
    named = any("plain attributes" in item.text for item in private.basis)
    assert named == (writes or kind == "more than is looked at")
