"""The next way of keeping records apart, by where the last failed and layers have records."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.gradients.isolation import WHOLE_MODEL, Isolation
from dpoptim.gradients.layers.expanded import places_of
from dpoptim.gradients.layers.registry import rule_for, takes_more_axes
from dpoptim.gradients.layers.rule import AnyRule
from dpoptim.runtime.torch_internals import pytree
from dpoptim.training.trials.made_up_records import Sample

NUMBER = re.compile(r"\d+")
LARGE = 1 << 23  # parameters, of which every record of a microbatch would have a row of gradients


@dataclass(frozen=True)
class Failure:
    """Why a way of keeping records apart does not serve.

    Attributes:
        reason: in words.
        fix: what would let it serve, without other ways of keeping records apart.
        modules: names of those where it shows; empty: unknown.
        outside: whether a parameter of these was used outside of their forward passes.
        unvectorised: whether nobody can vectorise them.
    """

    reason: str
    modules: tuple[str, ...] = ()
    outside: bool = False
    unvectorised: bool = False
    fix: str = ""


@torch.no_grad()
def places_of_records(
    model: nn.Module,
    sample: Sample,
    isolation: Isolation,
    *,
    lookups: bool = False,
    interleaved: bool = False,
) -> Isolation:
    """Where layers find records among input axes, by a run of the model as it is.

    Of layers with a rule; of others with parameters of their own, whether they see records at all.

    Args:
        lookups: whether lookups of (1, T) indices are made once for all records, not once for each.
        interleaved: whether layers with a rule that have records and positions on one axis have the
            positions first.
    """
    seen: dict[str, set[str]] = {}
    rows = sample.rows
    leaves = {name for name, module in model.named_modules() if not [*module.children()]}

    def note(name: str, rule: AnyRule | None, args: tuple[Any, ...], kwargs: Any) -> None:
        if rule is None:
            place = place_in_call((args, kwargs), rows, leaf=name in leaves)
        else:
            x = args[0] if args and isinstance(args[0], Tensor) else None
            place = (
                "first" if x is None or not x.dim() else place_in(x, rule, rows, lookups=lookups)
            )
        seen.setdefault(name, set()).add(place)

    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, name=name, rule=rule: note(name, rule, args, kwargs),
            with_kwargs=True,
        )
        for name, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters())
        and ((rule := rule_for(module)) is not None or places_of(module))
    ]
    try:
        sample.call(model)
    finally:
        for hook in hooks:
            hook.remove()

    def only(place: str) -> frozenset[str]:
        return frozenset(name for name, places in seen.items() if places == {place})

    modules, folded = dict(model.named_modules()), only("folded")
    turned = frozenset(name for name in folded if interleaved and rule_for(modules[name]))
    return replace(
        isolation,
        folded=folded - turned,
        interleaved=turned,
        time_first=only("time first"),
        shared=only("shared"),
        both=frozenset(name for name, places in seen.items() if {"shared", "first"} == places),
        windows=True,
    )


def sees_records(given: Any, rows: int) -> bool:
    """Whether a call's tensors, if there are any, may hold ``rows`` made-up records."""
    shapes = [x.shape for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    return not shapes or any(size % rows == 0 for shape in shapes for size in shape)


def place_in_call(given: Any, rows: int, *, leaf: bool) -> str:
    """Where records are in what a module without a rule is called with: `place_in`, if it tells.

    Args:
        leaf: whether the module has no others inside, which may tell by themselves.
    """
    if not sees_records(given, rows):
        return "shared"
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    alone = tensors[0] if len(tensors) == 1 and rows not in tensors[0].shape else None
    folded = leaf and alone is not None and alone.dim() and not len(alone) % rows
    return "folded" if folded else "first"


def place_in(x: Tensor, rule: AnyRule, rows: int, *, lookups: bool) -> str:
    """Where records are in a layer's input, by its sizes, for ``rows`` made-up records.

    Args:
        lookups: as for `places_of_records`.
    """
    first, second = (*x.shape, 0)[:2]
    if first == rows:
        return "first"
    if first == 1 and x.dim() > 1 and second != rows and not lookups:
        return "first"  # positions, looked up for each record
    if takes_more_axes(rule) and x.dim() > 1 and second == rows:
        return "time first"
    if first > rows and first % rows == 0:
        return "folded"
    return "shared"


def promoted(model: nn.Module, isolation: Isolation, failure: Failure) -> Isolation:
    """The next way: ``vmap`` around the failure, then of the model, then records alone.

    Before that, rules that know which layers' parameters are read outside of these; and of a module
    that nobody can vectorise, record by record, unless it is the model, or large.
    """
    if isolation.enforced:
        return Isolation.of("alone")
    if failure.unvectorised:
        return looped(model, isolation, failure)
    told = told_outside(model, isolation, failure)
    if told != isolation:
        return told
    modules = dict(model.named_modules())
    chosen = {*isolation.apart}
    for name in failure.modules or (WHOLE_MODEL,):
        chosen |= alike(modules, surroundings(modules, chosen, name))
    return kept_apart(isolation, chosen, isolation.by_loop)


def looped(model: nn.Module, isolation: Isolation, failure: Failure) -> Isolation:
    """The same, with the modules that cannot be vectorised run record by record.

    Records alone, which take less memory, where that is the model, or a large part of it.
    """
    modules = dict(model.named_modules())
    chosen = set[str]().union(*(alike(modules, name) for name in failure.modules))
    of = (modules[name] for name in chosen | {*isolation.by_loop})
    parameters = {p for module in of for p in module.parameters() if p.requires_grad}
    if not chosen or WHOLE_MODEL in chosen or sum(p.numel() for p in parameters) > LARGE:
        return Isolation.of("alone")
    return kept_apart(isolation, {*isolation.apart} | chosen, chosen | {*isolation.by_loop})


def kept_apart(isolation: Isolation, chosen: set[str], by_loop: Collection[str]) -> Isolation:
    """The same, with the outermost of these modules kept apart, some of them record by record."""
    outermost = [v for v in chosen if not any(v != other and inside(v, other) for other in chosen)]
    outside = frozenset(o for o in isolation.outside if not any(inside(o, v) for v in outermost))
    return replace(
        isolation,
        by_vmap=tuple(sorted(v for v in outermost if v not in by_loop)),
        by_loop=tuple(sorted(v for v in outermost if v in by_loop)),
        outside=outside,
    )


def alike(modules: Mapping[str, nn.Module], name: str) -> set[str]:
    """A module and those of its class; of containers only those at its place in other blocks."""
    kind, place = type(modules[name]), NUMBER.sub("#", name)
    return {
        key
        for key, module in modules.items()
        if type(module) is kind and (kind is not nn.Sequential or NUMBER.sub("#", key) == place)
    }


def told_more(model: nn.Module, isolation: Isolation, failure: Failure) -> Isolation:
    """The same rules, told of what their failure shows; as before, if that is nothing new."""
    if not failure.unvectorised:
        return told_outside(model, isolation, failure)
    told = looped(model, isolation, failure)
    return isolation if told.alone else told


def told_outside(model: nn.Module, isolation: Isolation, failure: Failure) -> Isolation:
    """The same way, told of the layers whose parameters were read outside of these, if any were."""
    around = {parent(name) for name in failure.modules} & {parent(o) for o in isolation.outside}
    # a second one in a module: what it computes by its layers' parameters may read all of them
    beside = [name for name, _ in model.named_modules() if name and parent(name) in around]
    read = in_all_blocks(model, [*failure.modules, *beside]) if failure.outside else set()
    if read <= isolation.outside:
        return isolation
    return replace(isolation, outside=isolation.outside | read, windows=True)


def surroundings(modules: Mapping[str, nn.Module], chosen: Iterable[str], failed: str) -> str:
    """The module to take as a whole where one in it failed."""
    taken = next((v for v in chosen if inside(failed, v)), None)
    # of a layer with a rule what is around it is the reason
    leaf = next(modules[failed].children(), None) is None
    alone = taken is None and leaf and rule_for(modules[failed]) is not None
    start = parent(failed) if alone else failed if taken is None else parent(taken)
    while start != WHOLE_MODEL and type(modules[start]).forward is nn.Module.forward:
        start = parent(start)  # a list of modules is never called
    return start


def inside(name: str, other: str) -> bool:
    """Whether a module is another one, or in it."""
    return other in ("", name) or name.startswith(f"{other}.")


def in_all_blocks(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Those with a rule of these layers, and of those at the same places in other blocks.

    Numbers alone tell the names of blocks apart, each of which would else take a trial.
    """
    places = {NUMBER.sub("#", name) for name in names}
    return {
        name
        for name, module in model.named_modules()
        if NUMBER.sub("#", name) in places and rule_for(module) is not None
    }


def parent(name: str) -> str:
    return name.rpartition(".")[0]
