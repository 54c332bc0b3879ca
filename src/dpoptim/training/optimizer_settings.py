"""Settings of an optimizer, as they are at one time."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """Each setting of an optimizer in its groups, such as ``lr``, and whose it is."""
    names = {name: None for group in optimizer.param_groups for name in group if name != "params"}
    found = {name: [plain(group.get(name)) for group in optimizer.param_groups] for name in names}
    return {**found, "params": [[*map(id, group["params"])] for group in optimizer.param_groups]}


def plain(setting: Any) -> Any:
    """Numbers that are not written into meanwhile, as tensors, arrays and lists are."""
    if isinstance(setting, list | tuple):
        return [plain(each) for each in setting]
    return setting.tolist() if isinstance(setting, Tensor | np.ndarray) else setting
