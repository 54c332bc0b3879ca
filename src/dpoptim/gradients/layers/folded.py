"""Layers that see records and positions folded together, such as the frames of a video."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from dpoptim.gradients.backward_pass import BackwardRecorder
from dpoptim.gradients.hooks.forwards import forward_of
from dpoptim.gradients.layers.rule import AnyRule, LayerRule, PerSampleGrads, Saved
from dpoptim.gradients.layers.vmapped import VmapLayer
from dpoptim.gradients.rows_of_records import sum_rows


class FoldedRule(LayerRule[nn.Module]):
    """The rule of a layer whose rows are the positions of records, one record's after the other's.

    A record's gradient is the sum over its positions, as that of a record of several rows is over
    these.

    Args:
        rule: of the layer, which takes each position for a record.
        positions: of each record; public, as the lengths of sequences are.
    """

    def __init__(self, rule: AnyRule, positions: int) -> None:
        self.rule, self.positions = rule, positions
        self.narrow, self.widens = rule.narrow, rule.widens

    def prepare(self, module: nn.Module, name: str, x: Tensor, rows: int | None) -> Tensor:
        return self.rule.prepare(module, name, x, len(x))

    def forward(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Saved]:
        return self.rule.forward(module, x)

    def input_gradient(self, module: nn.Module, saved: Saved, g: Tensor) -> Tensor | None:
        return self.rule.input_gradient(module, saved, g)

    def forms_at_once(self, module: nn.Module, saved: Saved, g: Tensor) -> bool:
        return self.rule.forms_at_once(module, saved, g)

    def per_sample_grads(self, module: nn.Module, saved: Saved, g: Tensor) -> PerSampleGrads:
        return self._of_records(self.rule.per_sample_grads(module, saved, g), len(g))

    def all_gradients(
        self, module: nn.Module, saved: Saved, g: Tensor
    ) -> tuple[Tensor | None, PerSampleGrads]:
        to_input, formed = self.rule.all_gradients(module, saved, g)
        return to_input, self._of_records(formed, len(g))

    def _of_records(self, of_rows: PerSampleGrads, rows: int) -> PerSampleGrads:
        return {name: sum_rows(each, rows, self.positions) for name, each in of_rows.items()}


class FoldedLayer:
    """Runs a module without a rule on one tensor: all positions of a record go with its own row.

    Args:
        by: see there.
    """

    hooks_children = False

    def __init__(
        self,
        recorder: BackwardRecorder,
        module: nn.Module,
        label: str,
        trainable: Sequence[str],
        by: type[VmapLayer] = VmapLayer,
    ) -> None:
        self._folded = by(
            recorder, module, label, trainable, forward=of_records(forward_of(module))
        )
        self._plain = by(recorder, module, label, trainable)

    def __call__(self, rows: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        one = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if not one or not rows or len(args[0]) % rows:
            return self._plain(rows, args, kwargs)
        return self._folded(rows, (args[0].unflatten(0, (rows, -1)),), {}).flatten(0, 1)


def of_records(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A forward pass on (records, positions, ...) by one on all positions."""

    def run(x: Tensor) -> Tensor:
        return forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    return run
