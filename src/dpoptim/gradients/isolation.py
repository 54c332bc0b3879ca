"""How records are kept apart: by rules for layers, by ``vmap``, or by passing alone.

* ``rules``: layers are hooked one by one, and each rule knows which gradient is whose. The
  fastest; it needs the records on the first axis of every layer (modules without a rule of their
  own go through ``vmap``).
* ``vmap``: the forward pass of a module, or of the whole model, is one vectorised call with a row
  of its parameters for each record. A record cannot index another one, so whatever the module does
  with its parameters is told apart. A module, not the model, that ``torch.func`` cannot vectorise
  runs once for each record instead, inside the forward pass of a batch (`by_loop`).
* ``alone``: microbatches have one record each. Any model and any loss.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from dpoptim.arguments import one_of

Tier = Literal["rules", "vmap", "alone"]
Choice = Literal["auto", "rules", "vmap", "alone"]
WHOLE_MODEL = ""


@dataclass(frozen=True)
class Isolation:
    """How each part of a model has its records kept apart.

    Args:
        alone: microbatches have one record each; then the rest does not matter.
        by_vmap: names of the modules that are vectorised as a whole; "" is the model.
        by_loop: names of the modules that run record by record inside a batch's forward pass,
            since nobody can vectorise them; never the model, for which ``alone`` takes less memory.
        batch_axis: the records' axis in what the model is given; 1 for (time, batch, ...) layouts.
        folded: names of layers whose first axis is that of records and positions, folded together.
        interleaved: names of those on whose first axis positions come before records.
        time_first: names of layers whose second axis is the records'.
        shared: names of layers that see no records at all: what they make of constants is the same
            for all.
        both: names of layers that see records, and also what is shared, which stays so.
        outside: names of layers whose parameters the model also reads outside of their forward
            passes.
        windows: whether tensors in which shared parameters meet data may have several rows for
            each record, one record's after the other's, such as the windows of an image.
        joined: how a call of the model has several inputs of each record, if it may: batches or
            records one after another.
        untried: whether nobody could run the model before the loop does, with a number of records
            unlike every other axis.
    """

    alone: bool = False
    by_vmap: tuple[str, ...] = ()
    by_loop: tuple[str, ...] = ()
    batch_axis: int = 0
    folded: frozenset[str] = frozenset()
    interleaved: frozenset[str] = frozenset()
    time_first: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    both: frozenset[str] = frozenset()
    outside: frozenset[str] = frozenset()
    windows: bool = False
    joined: Literal["", "by batches", "by records"] = ""
    untried: bool = False

    @property
    def tier(self) -> Tier:
        """The strongest one in use."""
        return "alone" if self.alone else "vmap" if WHOLE_MODEL in self.by_vmap else "rules"

    @property
    def apart(self) -> tuple[str, ...]:
        """Modules that see records with a row of the parameters for each."""
        return (*self.by_vmap, *self.by_loop)

    @property
    def folds(self) -> bool:
        """Whether some layer has records and positions on one axis."""
        return bool(self.folded or self.interleaved)

    @property
    def enforced(self) -> bool:
        """Whether no record can see another one, whatever the model does with its inputs."""
        return self.alone or WHOLE_MODEL in self.by_vmap

    def inputs_of_each(self, rows: int, delivered: int, *, turned: bool) -> int:
        """How many inputs of each delivered row went through the model at once.

        Args:
            turned: whether batches of them were put in the order of records.
        """
        several = self.joined == "by records" or (self.joined == "by batches" and turned)
        return max(1, rows // delivered) if several and delivered and rows % delivered == 0 else 1

    @classmethod
    def of(cls, tier: Tier, batch_axis: int = 0) -> "Isolation":
        """That of a whole model."""
        by_vmap = (WHOLE_MODEL,) if tier == "vmap" else ()
        return cls(alone=tier == "alone", by_vmap=by_vmap, batch_axis=batch_axis)


def require_choice(isolation: object, batch_axis: object) -> None:
    """Refuse other values of `attach`'s arguments."""
    one_of("isolation", isolation, get_args(Choice))
    if batch_axis not in (None, 0, 1) or isinstance(batch_axis, bool):
        raise ValueError(
            "batch_axis must be 0 for (batch, ...) inputs, 1 for (time, batch, ...), or None; got "
            f"{batch_axis!r}."
        )
