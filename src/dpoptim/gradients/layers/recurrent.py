"""What sets recurrent layers apart for the fallback: where their records are, and the state that they start from."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def record_axes(module: nn.Module) -> tuple[int, int]:
    """The record axis of a module's first tensor, and of all others, among its inputs as among its outputs.

    0 everywhere, but for recurrent layers: their states have the shape (layers, B, hidden).
    """
    if isinstance(module, nn.RNNBase):
        return (0 if module.batch_first else 1), 1
    return 0, 0


def with_initial_state(module: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The call's arguments with the state made explicit: torch.func cannot see through the one made inside."""
    given = dict(zip(("input", "hx"), args, strict=False)) | kwargs
    x = given["input"]
    if given.get("hx") is not None or not isinstance(x, Tensor):
        return (x, given.get("hx"))
    records = x.shape[record_axes(module)[0]]
    layers = module.num_layers * (2 if module.bidirectional else 1)
    hidden = torch.zeros(layers, records, module.proj_size or module.hidden_size, dtype=x.dtype, device=x.device)
    if not isinstance(module, nn.LSTM):
        return (x, hidden)
    return (x, (hidden, hidden.new_zeros(layers, records, module.hidden_size)))


@contextmanager
def without_fused_kernel(module: nn.Module) -> Iterator[None]:
    """Run a recurrent layer operator by operator: oneDNN's fused kernel needs a workspace that torch.func lacks."""
    if not isinstance(module, nn.RNNBase):
        yield
        return
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)
