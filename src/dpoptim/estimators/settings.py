"""Settings that everything has in common that learns privately in scikit-learn's manner."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.public_numbers import RELATIONS, relation_of
from dpoptim.estimators.repeats import CountsFits
from dpoptim.opacus_words import KnowsOpacus

Delta = float | Literal["auto"]


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateSettings(KnowsOpacus, CountsFits):
    """Base of estimators and transformers: a dataclass, whose fields are scikit-learn's settings.

    They are stored untouched. What is learnt is no argument.

    Args:
        label: public text for the ledger's entry; None: the class's name.
    """

    epsilon: float | None = None
    delta: Delta = "auto"
    neighboring: str | None = None
    ledger: Ledger | None = None
    noise_seed: int | None = None
    label: str | None = None
    relations: ClassVar[tuple[str, ...]] = RELATIONS  # that it can protect records under
    reads_sparse: ClassVar[bool] = True  # tables of SciPy

    @property
    def relation(self) -> str:
        """The neighbouring relation of its fits, by name."""
        return relation_of(self.neighboring, self.ledger, self.relations)

    @property
    def _named(self) -> str:
        """The name of its fits in the ledger."""
        return type(self).__name__ if self.label is None else self.label

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.noise_seed is None
        tags.input_tags.sparse = self.reads_sparse
        return tags
