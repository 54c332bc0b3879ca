"""Registry of layers with a rule; everything else with parameters is vectorised by ``vmap``."""

from collections.abc import Callable

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from dpoptim.gradients.backward_pass import BackwardRecorder
from dpoptim.gradients.hooks.computed_weights import computed_weights
from dpoptim.gradients.hooks.forwards import has_own_forward
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.layers.attention import AttentionLayer, is_attention
from dpoptim.gradients.layers.bare import BareParameters
from dpoptim.gradients.layers.cells import CellLayer, is_cell
from dpoptim.gradients.layers.convolution import ConvolutionRule
from dpoptim.gradients.layers.custom_rules import RegisteredLayer, registered_rule
from dpoptim.gradients.layers.embedding import EmbeddingBagLayer, EmbeddingRule, is_embedding_bag
from dpoptim.gradients.layers.expanded import places_of
from dpoptim.gradients.layers.linear import LinearRule, is_transposed_linear
from dpoptim.gradients.layers.normalisation import (
    GroupNormRule,
    LayerNormRule,
    RMSNormRule,
    RunningStatisticsRule,
    holds_statistics,
)
from dpoptim.gradients.layers.recurrent import RecurrentLayer, is_recurrent
from dpoptim.gradients.layers.rule import AnyRule
from dpoptim.gradients.layers.runner import Runner
from dpoptim.gradients.watch.contents import trainable_names

RULES: dict[type[nn.Module], AnyRule] = {
    nn.Linear: LinearRule(),
    nn.Conv1d: ConvolutionRule(),
    nn.Conv2d: ConvolutionRule(),
    nn.Conv3d: ConvolutionRule(),
    nn.Embedding: EmbeddingRule(),
    nn.LayerNorm: LayerNormRule(),
    nn.RMSNorm: RMSNormRule(),
    nn.GroupNorm: GroupNormRule(),
    nn.InstanceNorm1d: GroupNormRule(),
    nn.InstanceNorm2d: GroupNormRule(),
    nn.InstanceNorm3d: GroupNormRule(),
}


def rule_for(module: nn.Module) -> AnyRule | None:
    """The rule of a layer, or None where it has none of this package's.

    A subclass keeps the rule only if it kept the forward pass; a layer whose parameters live in
    submodules (parametrisations) or under other names (old-style weight norm) is no longer that
    layer.
    """
    if registered_rule(module) is not None:  # from outside: see `runner_for`
        return None
    if is_transposed_linear(module):
        return LinearRule(transposed=True)
    rule: AnyRule | None = RunningStatisticsRule() if holds_statistics(module) else None
    for kind, of_kind in () if rule is not None else RULES.items():
        if type(module).forward is kind.forward and isinstance(module, kind):
            rule = of_kind
            break
    if rule is None:  # most modules of a model, which may hold much
        return None
    own = {name for name, parameter in module.named_parameters() if parameter is not None}
    return rule if own <= {"weight", "bias"} else None


def takes_more_axes(rule: AnyRule) -> bool:
    """Whether any axes may lie between the records and what the layer works on."""
    return isinstance(rule, LinearRule | LayerNormRule | RMSNormRule | EmbeddingRule)


# Layers that their runners know as a whole.
WHOLE: tuple[tuple[Callable[[nn.Module], bool], Callable[..., Runner]], ...] = (
    (is_recurrent, RecurrentLayer),
    (is_attention, AttentionLayer),
    (is_embedding_bag, EmbeddingBagLayer),
)


def runner_for(
    recorder: BackwardRecorder,
    module: nn.Module,
    label: str,
    isolation: Isolation,
) -> Runner | None:
    """Runs a module without a rule; None: its children hold all."""
    if is_parametrized(module) or computed_weights(module) is not None:
        # its weights are computed inside it
        return BareParameters(recorder, module, label, trainable_names(module), isolation)
    by_class = not has_own_forward(module)
    own = registered_rule(module)
    if own is not None and by_class:
        return RegisteredLayer(recorder, module, label, own)
    for known, runner in WHOLE:
        if known(module) and by_class:
            return runner(recorder, module, label)
    if is_cell(module) and by_class:
        return CellLayer(recorder, module, label, isolation)
    if not places_of(module):
        return None
    return BareParameters(recorder, module, label, trainable_names(module), isolation)
