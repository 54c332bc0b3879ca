"""Which layers have a rule of their own. Everything else with parameters goes through the fallback."""

from torch import nn

from dpoptim.gradients.layers.convolution import ConvolutionRule
from dpoptim.gradients.layers.embedding import EmbeddingRule
from dpoptim.gradients.layers.linear import LinearRule
from dpoptim.gradients.layers.normalisation import GroupNormRule, LayerNormRule, RMSNormRule
from dpoptim.gradients.layers.rule import LayerRule

RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: LinearRule(),
    nn.Conv1d: ConvolutionRule(),
    nn.Conv2d: ConvolutionRule(),
    nn.Embedding: EmbeddingRule(),
    nn.LayerNorm: LayerNormRule(),
    nn.RMSNorm: RMSNormRule(),
    nn.GroupNorm: GroupNormRule(),
}


def rule_for(module: nn.Module) -> LayerRule | None:
    """The rule of a layer, or None where only the fallback will do.

    A subclass keeps the rule only if it kept the forward pass; a layer whose parameters live in submodules
    (parametrisations) or under other names (old-style weight norm) is no longer that layer.
    """
    for kind, rule in RULES.items():
        if type(module).forward is kind.forward and isinstance(module, kind):
            own = {name for name, parameter in module.named_parameters() if parameter is not None}
            return rule if own <= {"weight", "bias"} else None
    return None


__all__ = ["RULES", "LayerRule", "rule_for"]
