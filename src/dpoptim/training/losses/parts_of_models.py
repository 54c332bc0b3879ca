"""A model as a loss sees it that is taken one record at a time: calls, parameters, settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.runtime.torch_internals import version_of
from dpoptim.training.losses.by_record import PLAIN, copied, has_rows, tensors_in

OTHER_INPUTS = (
    "per_sample takes a loss that gives the model the same for a record as for the batch; this one "
    "does not: it draws random numbers before the call, computes inputs over the batch, or gives "
    "rows in another form or order (flatten, repeat_interleave, a cut to the longest). Fix: draw "
    "each record's own numbers in the data set or in collate_fn, or in the model's forward; "
    "reshape there, too. model(torch.cat((a, b))) is served."
)
WITH_GRADIENTS = (
    "per_sample takes a loss that gives the model what is in the batch; this one gives it what has "
    "gradients: what the model returned, parameters, or inputs of a gradient penalty. Fix: let the "
    "model's forward do that, and return what the loss needs."
)
READS = (
    "per_sample takes a loss that calls its model, or modules in it, and reads parameters and "
    "settings; this one reads {}, which may hold something of all records. Fix: call the model, "
    "model(x), and let its forward return what the loss needs."
)


class Part:
    """A model, or a module in it: calls go to whoever answers them.

    Trainable parameters are those of the record; buffers, frozen ones and settings are as they
    are. What may hold something else, or reach it, is refused.
    """

    def __init__(self, module: nn.Module, answers: "Noted | Known") -> None:
        vars(self).update(_module=module, _answers=answers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answers.call(self._module, args, kwargs)

    def __getitem__(self, place: Any) -> Any:
        return self._seen(f"[{place!r}]", self._module[place])

    def __getattr__(self, name: str) -> Any:
        return self._seen(name, getattr(self._module, name))

    def __setattr__(self, name: str, value: Any) -> None:
        raise PrivacyError(f"a loss under per_sample sets model.{name}. Fix: before training.")

    def parameters(self, recurse: bool = True) -> Iterator[Tensor]:
        return (p for _, p in self.named_parameters(recurse=recurse))

    def named_parameters(self, *, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        named = self._module.named_parameters(recurse=recurse)
        return ((name, self._answers.own(p)) for name, p in named)

    def _seen(self, name: str, value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return self._answers.own(value)
        if isinstance(value, nn.Module):
            return Part(value, self._answers)
        known = self._answers.settings.get(self._module, {})
        if (name in known and known[name] == stamp(value)) or name == "config":
            return value
        raise PrivacyError(READS.format(name))


@dataclass(frozen=True)
class Call:
    """A call of a module: what it was given, arguments and keywords, and what it returned.

    Attributes:
        parts: of the batch, one after the other, that it was given.
    """

    module: nn.Module
    given: tuple[tuple[Any, ...], dict[str, Any]]
    returned: Any
    parts: int


class Noted:
    """Answers of the model itself, on the batch, which are noted.

    The loss gets copies: whatever it does to them, no other record meets it.

    Args:
        rows: of the batch.

    Attributes:
        made: calls of the model, and of modules in it.
        read: parameters that the loss read, in turn.
        settings: of each module before the first call, and its buffers' versions: what its
            forward pass writes may be something of the batch.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        self._rows, self.settings = rows, settings_of(model)
        self.made = list[Call]()
        self.read = dict[int, nn.Parameter]()

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(x.requires_grad for x in tensors_in((args, kwargs))):
            raise PrivacyError(WITH_GRADIENTS)
        returned = module(*args, **kwargs)
        lengths = [len(x) for x in tensors_in((args, kwargs)) if x.dim()]
        several = (n // self._rows for n in lengths if n and n % self._rows == 0)
        # what is as long as the batch is the batch, whatever multiple of it another tensor is
        parts = 1 if self._rows in lengths else next(several, 1)
        self.made.append(Call(module, (args, kwargs), returned, parts))
        return copied(returned)

    def own(self, p: nn.Parameter) -> Tensor:
        if p.requires_grad:
            self.read.setdefault(id(p), p)
        return p

    def returned(self) -> list[Tensor]:
        """Tensors with the records' rows, of all calls in turn."""
        return [
            x
            for call in self.made
            for x in tensors_in(call.returned)
            if has_rows(x, call.parts * self._rows)
        ]


class Known:
    """Answers to the loss of one record: its rows of what the model returned, in turn.

    Args:
        calls: modules, with what they return.
        parameters: as the record has them, by id.
        settings: see `Noted`.
    """

    def __init__(
        self,
        calls: list[tuple[nn.Module, Any]],
        parameters: Mapping[int, Tensor],
        settings: Mapping[nn.Module, Mapping[str, Any]],
    ) -> None:
        self._calls, self._parameters, self.settings = calls, parameters, settings
        self.given = list[tuple[tuple[Any, ...], dict[str, Any]]]()

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = len(self.given)
        if place >= len(self._calls) or self._calls[place][0] is not module:
            raise PrivacyError(OTHER_INPUTS)
        self.given.append((args, kwargs))
        return self._calls[place][1]

    def own(self, p: nn.Parameter) -> Tensor:
        if not p.requires_grad:
            return p
        if id(p) not in self._parameters:
            raise PrivacyError(OTHER_INPUTS)
        return self._parameters[id(p)]


def settings_of(model: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Plain attributes and buffers of each module, as they are now."""
    return {
        module: {
            name: stamp(value)
            for name, value in (*vars(module).items(), *module._buffers.items())
            if isinstance(value, PLAIN | Tensor)
        }
        for module in model.modules()
    }


def stamp(value: Any) -> Any:
    """A value that tells whether an attribute has been changed."""
    return (id(value), version_of(value)) if isinstance(value, Tensor) else value
