"""A device of its own, made of the CPU's memory: builds `pretend.cpp` and tells PyTorch of it."""

import contextlib
import subprocess
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_suffix(".cpp")


def build(compiler: str, library: Path) -> None:
    """Raises: RuntimeError: what the compiler says."""
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-O0", str(SOURCE), "-o", str(library)]
    # a header with every operator takes half as long again
    command += ["-DAT_PER_OPERATOR_HEADERS", *(f"-I{f}" for f in cpp_extension.include_paths())]
    command += [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        raise RuntimeError(built.stderr[-3000:])


def register(library: Path) -> torch.device:
    """Once in a process, before its first backward pass: autograd counts the devices then."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend("pretend")
    torch._register_device_module("pretend", python_side())
    return torch.device("pretend")


def python_side() -> ModuleType:
    """What PyTorch asks a device's Python module for. Random numbers are the CPU's, so there is no
    state to keep.
    """
    module = ModuleType("torch.pretend")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda *device: torch.zeros(1, dtype=torch.uint8, device="cpu")
    module.set_rng_state = lambda *arguments: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.device = lambda index: contextlib.nullcontext()
    return module
