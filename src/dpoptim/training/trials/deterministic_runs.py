"""Run a model to look at it, deterministically; everything that moved is put back."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.gradients.arithmetic.precision import no_tf32
from dpoptim.gradients.hooks.computed_weights import follows_weights
from dpoptim.gradients.watch.contents import Contents
from dpoptim.runtime.parametrizations import parametrizations_kept
from dpoptim.runtime.torch_internals import local_part, parts_held
from dpoptim.training.randomness.generators import (
    Generator,
    everywhere,
    of_torch,
    states_of,
)
from dpoptim.training.randomness.secret_randomness import put_generators_back, seed_torch
from dpoptim.training.trials.fixed_noise import MIDDLE, RARE, FixedNoise
from dpoptim.training.trials.own_generators import generators_of

COPIED_PARAMETERS = 1 << 22
MOVED = 1e-2  # of itself, a parameter
LARGE_PRIME = 9973  # sines of larger numbers are not exact


@contextmanager
def put_back(model: nn.Module, own: Sequence[Generator] | None = None) -> Iterator[None]:
    """Restore modes, buffers, random generators, and parameters of all but very large models.

    Args:
        own: the model's generators; None: to be found.
    """
    own = generators_of(model) if own is None else own
    found = Contents.of(model)
    modes = [(module, module.training) for _, module in found.modules]
    before, holders = copies_in(found), holders_in(found)
    elsewhere = {p.device for _, p in found.parameters if p.device.type != "cpu"}
    try:
        with ExitStack() as generators, parametrizations_kept(model):
            generators.enter_context(put_generators_back(own))
            generators.enter_context(torch.random.fork_rng([]))
            for device in elsewhere:
                generators.enter_context(
                    torch.random.fork_rng([device.index or 0], device_type=device.type)
                )
            yield
    finally:
        for module, training in modes:
            if module.training is not training:
                module.training = training
        for holder, held in holders:
            holder.update({name: t for name, t in held.items() if holder.get(name) is not t})
        write_back(before)


@torch.no_grad()
def write_back(values: dict[Tensor, Tensor]) -> None:
    """Give tensors these values, and the shapes of these."""
    for t, value in values.items():
        if t.shape != value.shape:
            t.resize_(value.shape)
        if not torch.equal(t, value):
            t.copy_(value)


def holders_in(model: Contents) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Where modules hold buffers and parameters, and which, but those that are first made later.

    Not of parameters that are spread: what gathers them puts others in their places.
    """
    found: list[dict[str, Any]] = [module._buffers for _, module in model.modules]
    if not any(spread(p) for _, p in model.parameters):
        found += [module._parameters for _, module in model.modules]
    return [
        (holder, {name: t for name, t in holder.items() if t is not None})
        for holder in found
        if holder
    ]


def copies_in(model: Contents) -> dict[Tensor, Tensor]:
    """Copies of a model's buffers, and of its parameters if it is not very large."""
    # a forward pass has copies of parameters that are spread, and no way to write into those
    copied = [buffer for _, buffer in model.buffers]
    parameters: list[Tensor] = [p for _, p in model.parameters if not spread(p)]
    # of larger ones there may be no room for two
    if sum(p.numel() for p in parameters) <= COPIED_PARAMETERS:
        copied += parameters
    return {part: part.detach().clone() for t in copied for part in parts_held(t)}


@contextmanager
def same_made_up_records(model: nn.Module) -> Iterator[None]:
    """Draw the same made-up records in all processes. Everything is `put_back`."""
    with put_back(model):
        seed_torch(0)
        yield


def spread(p: Tensor) -> bool:
    """Whether this process has a part of a tensor only."""
    return local_part(p) is not p


@contextmanager
def other_weights(model: nn.Module, seed: int) -> Iterator[None]:
    """Move every parameter by up to a hundredth of itself, and put it back exactly.

    Where a comparison failed because rounding turned a ReLU or a maximum, it passes with other
    weights; where records are mixed, it fails again. No random generator takes part, as noise
    may be fixed.
    """
    held = [part for p in model.parameters() for part in parts_held(p)]
    moved = [part for part in held if part.is_floating_point()]
    before = [p.detach().clone() for p in moved]
    try:
        with torch.no_grad():
            for p in moved:
                numbers = torch.arange(p.numel(), device=p.device) % LARGE_PRIME
                waves = (numbers * (seed + 1.0)).sin()
                p.mul_((1 + MOVED * waves).view_as(p).to(p.dtype))
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(moved, before, strict=True):
                p.copy_(value)


@dataclass(frozen=True)
class Quieted:
    """How `quiet` made a model deterministic.

    Attributes:
        evaluates: whether it put the model into evaluation mode for it.
        draws: whether it did not succeed: numpy's or Python's generators, or the model's own of
            such a kind, are drawn from in evaluation mode, too.
        elsewhere: whether it draws from such generators as it is trained.
        noise: what is drawn instead, if anything is.
    """

    evaluates: bool = False
    draws: bool = False
    elsewhere: bool = False
    noise: FixedNoise | None = None

    @property
    def shares(self) -> bool:
        """Whether all records shared some number that was drawn meanwhile."""
        return self.noise is not None and self.noise.shared


@contextmanager
def quiet(
    model: nn.Module,
    run: Callable[[], list[Tensor]],
    *,
    as_trained: bool = False,
    uniform: float = MIDDLE,
) -> Iterator[Quieted]:
    """Make the model deterministic, in training mode if that can be; everything is `put_back`.

    Dropout layers are switched off. If ``run`` still draws random numbers from torch's generators
    or the model's own of torch's kind, they are always the same; where that cannot be done, the
    whole model goes to evaluation mode, unless it is wanted ``as_trained``. ``uniform`` is as in
    `noise_of`. It runs with gradients, which losses with gradient penalties take, and without TF32.
    """
    own = generators_of(model)
    with looked_at(model, own), ExitStack() as noise:
        draws, elsewhere = draws_random_numbers(run, own)
        found = Quieted()
        if draws:
            fixed = noise.enter_context(noise_of(uniform))
            found = Quieted(elsewhere=elsewhere, noise=fixed)
            if not as_trained and (elsewhere or depends_on_seed(run)):
                model.eval()
                draws = elsewhere and draws_random_numbers(run, own)[1]
                found = replace(found, evaluates=True, draws=draws)
        yield found


def noise_of(uniform: float) -> FixedNoise:
    """Noise of such numbers; whole ones, and coins, are as large, but rare where it is `MIDDLE`."""
    return FixedNoise(uniform, quantile=RARE if uniform == MIDDLE else uniform)


@contextmanager
def quiet_as_before(
    model: nn.Module, before: Quieted, uniform: float = MIDDLE
) -> Iterator[Quieted]:
    """Make the model deterministic as `quiet` did, without trying what it draws once more."""
    with looked_at(model, generators_of(model)), ExitStack() as noise:
        found = before
        if before.noise is not None:
            found = replace(before, noise=noise.enter_context(noise_of(uniform)))
        if before.evaluates:
            model.eval()
        yield found


class Remembered:
    """A run, and what it returned last."""

    def __init__(self, run: Callable[[], list[Tensor]]) -> None:
        self._run, self._last = run, list[Tensor]()

    def __call__(self) -> list[Tensor]:
        self._last = []  # before the next one's graph takes as much
        self._last = self._run()
        return self._last

    def last(self, quieted: Quieted) -> list[Tensor]:
        """Results that `quiet`, given this, saw twice of the model as it left it; none: it did not.

        Nor where it fixed noise, which may since have seen more. Once: they may be large.
        """
        last, self._last = self._last, []
        return [] if quieted.evaluates or quieted.noise is not None else last


class Quieting:
    """`quiet` for a program and several batches: once seen to draw, it is not tried again."""

    def __init__(self) -> None:
        self._drew = dict[float, Quieted]()  # with such numbers

    @contextmanager
    def quiet(
        self, model: nn.Module, run: Callable[[], list[Tensor]], uniform: float
    ) -> Iterator[Quieted]:
        before = self._drew.get(uniform)
        if before is not None:
            with quiet_as_before(model, before, uniform) as found:
                yield found
            return
        with quiet(model, run, uniform=uniform) as found:
            if found.noise is not None:
                self._drew[uniform] = found
            yield found


@contextmanager
def looked_at(model: nn.Module, own: Sequence[Generator]) -> Iterator[None]:
    """Run the model without dropout, with gradients, in all digits; everything is `put_back`."""
    with put_back(model, own), torch.enable_grad(), no_tf32():
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) or follows_weights(module):
                module.eval()
        yield


@contextmanager
def autocast_seen(*, off: bool = False) -> Iterator[set[torch.dtype]]:
    """Notes the dtypes in which the program has autocast compute; keeps it ``off``, if asked to."""
    switch: Callable[..., None] = torch.set_autocast_enabled
    choose: Callable[[str, torch.dtype], None] = torch.set_autocast_dtype
    asked, on = set[torch.dtype](), False

    def switched(*args: Any) -> None:  # a device, or none, and whether
        nonlocal on
        switch(*args[:-1], bool(args[-1]) and not off)
        on = torch.is_autocast_enabled(*args[:-1])

    def chosen(device: str, dtype: torch.dtype) -> None:  # what follows the switch
        if on:
            asked.add(dtype)
        choose(device, dtype)

    vars(torch).update(set_autocast_enabled=switched, set_autocast_dtype=chosen)
    try:
        yield asked
    finally:
        vars(torch).update(set_autocast_enabled=switch, set_autocast_dtype=choose)


@contextmanager
def in_all_digits(run: Callable[[], object]) -> Iterator[None]:
    """Leave autocast off that a model switches on by itself, as in Accelerate's mixed precision.

    In few digits rounding looks like records that are mixed. A model that does not ``run`` without
    is left as it is.
    """
    with autocast_seen() as asked, torch.no_grad():
        run()
    runs = bool(asked)
    if runs:
        try:
            with autocast_seen(off=True), torch.no_grad():
                run()
        except Exception:  # whatever the user's model raises where something is in the other dtype
            runs = False
    with autocast_seen(off=True) if runs else nullcontext():
        yield


def draws_random_numbers(
    run: Callable[[], list[Tensor]], own: Sequence[Generator]
) -> tuple[bool, bool]:
    """Whether a run draws at all, and whether by generators like numpy's, which nothing here fixes.

    Generators tell, as rare dropout need not show in the result; and results, since not every
    generator may be found.

    Args:
        own: the model's.
    """
    ours = [torch.default_generator, *(each for each in own if of_torch(each))]
    others = [each for each in everywhere(own) if not of_torch(each)]
    seed_torch(0)
    before, others_before = states_of(ours), states_of(others)
    first = results(run)
    elsewhere = states_of(others) != others_before
    drew = elsewhere or states_of(ours) != before
    return drew or moved_by_seed(first, run), elsewhere


def depends_on_seed(run: Callable[[], list[Tensor]]) -> bool:
    seed_torch(0)
    return moved_by_seed(results(run), run)


def moved_by_seed(first: list[Tensor], run: Callable[[], list[Tensor]]) -> bool:
    """Whether a run returns something else with another seed than 0, which it had before."""
    seed_torch(1)
    return not all(same_numbers(a, b) for a, b in zip(first, results(run), strict=True))


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether tensors are equal, where what is no number (NaN) equals itself."""
    return torch.equal(a, b) or (
        a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )


def results(run: Callable[[], list[Tensor]]) -> list[Tensor]:
    return [out.detach() for out in run()]
