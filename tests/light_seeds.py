"""``torch.manual_seed`` without the stack that it writes down for each kind of accelerator that is
not there: a millisecond under pytest, and `attach` seeds eight times. And garbage is collected
seldom, which took a twentieth of the time.
"""

import gc
from types import SimpleNamespace

import torch

for kind in (torch.cuda, torch.xpu, torch.mtia):
    vars(kind)["traceback"] = SimpleNamespace(format_stack=list)

gc.set_threshold(20_000, 10, 10)
