"""A model's contents beside its gradients: it may neither leave nor mix records.

Released sums are noisy; whatever else a forward pass leaves behind is not: running statistics in
buffers, code books in frozen parameters, initialisation by the first batch, extra state. All of it
is compared by value (`values`), since writes through ``.data`` leave no other trace.
"""

import operator
from collections.abc import Container, Iterable, Iterator

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpoptim.errors import PrivacyError
from dpoptim.gradients.hooks.forwards import forwards_in
from dpoptim.gradients.watch.contents import Contents
from dpoptim.gradients.watch.plain_attributes import PlainAttributes
from dpoptim.gradients.watch.values import Values, digest
from dpoptim.runtime.torch_internals import (
    gradient_hook_ids,
    has_hooks,
    hooks_on_all_modules,
    module_hooks,
)

# bytes of constants that are read at each release, at least; of more, some in turn
READ_AT_ONCE = 1 << 26
WITHOUT_NOISE = "it would carry private statistics out of the model without noise"
ROTATIONS = ("inv_freq", "original_inv_freq")  # Hugging Face's buffers of RoPE
NOTHING_KEPT = (
    "use layers that keep no running statistics; a code book that is learnt by gradients in place "
    "of averages (VQ-VAE), a centre that is fixed or of public data (DINO), negatives from public "
    "data in place of a queue (MoCo)"
)
TEACHER = (
    "; keep a teacher that follows the model as a plain object outside of it, updated after step()"
)


def fix_of_kept(name: str) -> str:
    """Fix for a buffer or parameter of this name that forward passes write into."""
    if name.rpartition(".")[2] not in ROTATIONS:
        return NOTHING_KEPT
    return (
        "pad each record in collate_fn to one public length, on one side of "
        "original_max_position_embeddings: by RoPE of a dynamic or longrope kind the longest "
        "record of a batch sets the frequencies for all; or a rope_scaling that does not depend "
        "on it (linear, yarn)"
    )


class ModelWatch:
    """Watches a model while its engine is attached.

    Args:
        model: with the engine's hooks in place.
        iterated: buffers that the engine itself writes between steps, from weights alone, by name.

    Attributes:
        in_turn: whether some constants are read in turn, because they are large.
        plain: what the model keeps in plain attributes.
        step_begins: whether the next batch is the first part of its step's.

    **Guarantee.** From `begin` to `end`, nobody wrote into trainable parameters if
    `refuse_changes` passes; and since the model was attached, buffers, frozen parameters, extra
    state, hooks and forward passes are what they were: all of them with ``everything``, else large
    frozen parameters in turn.
    """

    def __init__(self, model: nn.Module, iterated: Iterable[tuple[str, Tensor]] = ()) -> None:
        self.model = model
        found = Contents.of(model)
        self._trainable = Values(found.trainable())
        self._iterated = Values(iterated)
        own = {name for name, _ in self._iterated.tensors}
        self._trained = {id(p) for _, p in found.trainable()}
        constants = found.constants(self._trained)
        self._identities = {name: id(t) for name, t in constants}
        fixed = [(name, t) for name, t in constants if name not in own]
        large = max(
            READ_AT_ONCE, 4 * sum(p.numel() * p.element_size() for _, p in found.trainable())
        )
        self._fixed = [Values(part) for part in parts_by_size(fixed, large)]
        self._turn = 0
        self._extra = [each for each in found.modules if keeps_extra_state(each[1])]
        self._extra_noted = self._extra_digests()
        self._surplus_noted = other_entries(model)
        self._modules = [
            (name, module, forwards_in(vars(module))) for name, module in found.modules
        ]
        self._parts = [(name, module, type(module)) for name, module in found.modules]
        self.plain = PlainAttributes(found)
        self._first_new_hook = self._hooks_seen = RemovableHandle.next_id
        self._in_batch = self._running = False
        self.step_begins = True

    @property
    def in_turn(self) -> bool:
        return len(self._fixed) > 2

    def begin(self) -> None:
        """A batch, or a part of one, is about to be seen."""
        if self._in_batch:
            self._refuse_written_parameters()
        else:
            self._trainable.note()
        self._in_batch, self.step_begins = True, False
        self._refuse_new_hooks()

    def noted_weights(self) -> int:
        """A checksum of the trained parameters as the batch began; the same for equal values."""
        return self._trainable.checksum()

    def note_iterated(self) -> None:
        """The engine has written into what it iterates."""
        self._iterated.note()

    def end(self, *, again: bool = False) -> None:
        """Let the caller change trainable parameters, the batch's sums being taken.

        Args:
            again: they were forgotten, to be added up once more.
        """
        self._in_batch, self.step_begins = False, self.step_begins or not again

    def refuse_changes(self, *, everything: bool = False) -> None:
        """Refuse what was written.

        Args:
            everything: also what is otherwise read in turn, and what else a state dict holds.

        Raises:
            PrivacyError: by name.
        """
        if self._in_batch:
            self._refuse_written_parameters()
        found = Contents.of(self.model)
        self._refuse_swapped_modules(found)
        # the caller may freeze them: the noisy mean of what is frozen moves nothing
        refuse_frozen_or_unfrozen(found, self._trained, may_freeze=True)
        self._refuse_changed_constants(found, everything)
        self.plain.compare(found, everything=everything)
        if self._extra and self._extra_digests() != self._extra_noted:
            raise self._changed("extra state", next(iter(self._extra))[0])
        self._refuse_new_hooks(everywhere=True)
        if everything and (now := other_entries(self.model)) != self._surplus_noted:
            keys = sorted(
                key
                for key in {*now, *self._surplus_noted}
                if now.get(key) != self._surplus_noted.get(key)
            )
            raise self._changed("entry of the state dict", keys[0])

    def before_forward(self) -> None:
        """Note the parameters when the model runs: a forward pass may not change them."""
        if not self._in_batch and not self._running:
            self._trainable.note()
            self._running = True

    def after_forward(self) -> None:
        if self._running:
            self._running = False
            if not self._in_batch and (name := self._trainable.changed()) is not None:
                raise self._changed("parameter", name)

    def _refuse_written_parameters(self) -> None:
        name = self._trainable.changed()
        if name is not None:
            raise PrivacyError(
                f"parameter {name!r} was changed between the delivery of a batch and "
                "optimizer.step(): it might carry private statistics out of the model without "
                "noise. Fix: let no forward pass write into parameters (in place of "
                "self.weight.data *= mask, F.conv2d(x, self.weight * self.mask)); change them "
                "(averages, constraints, initialisation) before the loop or after optimizer.step()."
            )

    def _refuse_changed_constants(self, found: Contents, everything: bool) -> None:
        now = {name: id(t) for name, t in found.constants(self._trained)}
        if now != self._identities:
            names = sorted(
                {*now, *self._identities}, key=lambda key: now.get(key) == self._identities.get(key)
            )
            raise self._changed(kind_of(self.model, names[0]), names[0])
        first, rest = self._fixed[:1], self._fixed[1:]
        if not everything and rest:
            self._turn = (self._turn + 1) % len(rest)
            rest = [rest[self._turn]]
        for values in (self._iterated, *first, *rest):
            if (name := values.changed()) is not None:
                raise self._changed(kind_of(self.model, name), name)

    def _changed(self, kind: str, name: str) -> PrivacyError:
        return PrivacyError(
            f"{kind} {name!r} was changed during private training: {WITHOUT_NOISE}. Fix: "
            f"{fix_of_kept(name)}{TEACHER}; or change it before attaching."
        )

    def _extra_digests(self) -> list[bytes]:
        return [digest(module.get_extra_state()) for _, module in self._extra]

    def _refuse_swapped_modules(self, found: Contents) -> None:
        """Refuse modules in others' places, which have not been tried for mixing records."""
        now = {name: (id(module), type(module)) for name, module in found.modules}
        for name, module, kind in self._parts:
            if now.get(name) != (id(module), kind):
                raise PrivacyError(
                    f"module {label_of(name)} was replaced after attaching. Fix: replace it before "
                    "dpoptim.attach, which then tries it on made-up records."
                )

    def _refuse_new_hooks(self, *, everywhere: bool = False) -> None:
        """Refuse hooks that came later: they have not been tried for mixing records.

        Args:
            everywhere: look for them also where PyTorch has numbered none since the last look.
        """
        for name, m, noted in self._modules:
            if any(map(operator.is_not, forwards_in(m.__dict__), noted)):
                raise PrivacyError(
                    f"the forward pass of {label_of(name)} was replaced after attaching. Fix: "
                    "replace it before dpoptim.attach."
                )
        newest = RemovableHandle.next_id  # numbers of hooks only grow, with every one anywhere
        if newest == self._hooks_seen and not everywhere:
            return
        first = self._first_new_hook
        for name, m, _ in self._modules:
            if has_hooks(m) and max(module_hooks(m)) >= first:
                raise PrivacyError(
                    f"a hook was registered on {label_of(name)} after attaching: it may let "
                    "records see each other, forwards or backwards. Fix: register it before "
                    "dpoptim.attach, which then tries it on made-up records."
                )
        for name, p in self._trainable.tensors:
            if max(gradient_hook_ids(p), default=-1) >= first:
                raise PrivacyError(
                    f"a hook was registered on the gradient of {name!r} after attaching; it never "
                    "exists outside of optimizer.step(). Fix: "
                    "optimizer.register_step_pre_hook(hook), which finds the noisy mean in .grad."
                )
        if max(hooks_on_all_modules(), default=-1) >= first:
            raise PrivacyError(
                "a hook was registered for all modules after attaching: it may let records see "
                "each other. Fix: register it before dpoptim.attach, which then tries it on "
                "made-up records."
            )
        self._hooks_seen = newest


def refuse_frozen_or_unfrozen(
    found: Contents, trained: Container[int], *, may_freeze: bool = False
) -> None:
    """Refuse another choice of what trains than that which was attached.

    Args:
        trained: ids of the parameters that trained then.
        may_freeze: whether these may be frozen meanwhile.
    """
    for name, p in found.parameters:
        if p.requires_grad != (id(p) in trained) and (p.requires_grad or not may_freeze):
            change = "unfrozen, or put in another's place," if p.requires_grad else "frozen"
            raise PrivacyError(
                f"parameter {name!r} was {change} after attaching. Fix: replace layers and "
                "load_state_dict(..., assign=True) before dpoptim.attach, or attach again. What is "
                "to train later trains while attach is called: requires_grad_(True) before, and "
                "requires_grad_(False) after it for the time in which it rests."
            )


def label_of(name: str) -> str:
    return repr(name) if name else "the model"


def kind_of(model: nn.Module, name: str) -> str:
    return "frozen parameter" if name in dict(model.named_parameters()) else "buffer"


def parts_by_size(
    tensors: list[tuple[str, Tensor]], most: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Buffers and what else is small, and then parts of about ``most`` bytes of the rest."""
    size = 0
    part: list[tuple[str, Tensor]] = []
    for name, t in sorted(tensors, key=lambda item: isinstance(item[1], nn.Parameter)):
        part.append((name, t))
        size += t.numel() * t.element_size()
        if size > most:
            yield part
            part, size = [], 0
    yield part


def keeps_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def other_entries(model: nn.Module) -> dict[str, bytes]:
    """Contents of a state dict beside parameters and buffers, digested."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {key: digest(value) for key, value in model.state_dict().items() if key not in known}
