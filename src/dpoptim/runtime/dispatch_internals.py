"""Operators that draw random numbers, run by Python in PyTorch's place: in one thread, for a while.

A `TorchDispatchMode` is asked before every operator, which takes longer than most of them. Here the
dispatcher itself tells the operators that are meant from all others, which it runs as ever: by a
dispatch key that no tensor has, and that only they have a kernel for.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import get_ident
from typing import Any

import torch
from torch import Tag
from torch.library import Library, fallthrough_kernel

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
# Made for torchdistx, which is no more; below autograd and torch.func, above devices and subclasses
NAME = "Fake"
KEY: Any = torch._C._parse_dispatch_key(NAME)
# how names of operators begin whose results are random numbers, and nothing else
DRAWN = (
    *("bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal", "multinomial"),
    *("normal", "poisson", "rand", "uniform", "_sample_dirichlet", "_standard_gamma"),
)
# of those that compute with them
DRAWN_WITHIN = ("native_dropout", "_fused_dropout", "rrelu_with_noise")
_entered: list[tuple[int, Handler]] = []  # with the thread's number


@contextmanager
def drawing_operators_run_by(handler: Handler) -> Iterator[None]:
    """Have ``handler(operator, args, kwargs)`` run operators that draw random numbers.

    They come to it once autograd and torch.func are done; what it calls itself runs as ever. What
    is compiled runs eagerly meanwhile, as under a `TorchDispatchMode`. Of several handlers the last
    one entered counts. Attention and recurrent layers, whose kernels draw, are not among them.
    """
    put_kernels()
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        entered = get_ident(), handler
        _entered.append(entered)
        stack.callback(_entered.remove, entered)
        stack.enter_context(torch._C._IncludeDispatchKeyGuard(KEY))
        yield


@cache
def put_kernels() -> list[Library]:
    """Give these operators kernels that ask the handler, and all others none; once a process."""
    others, libraries = Library("_", "IMPL"), dict[str, Library]()
    others.fallback(fallthrough_kernel, NAME)
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(KEY)  # of those to come
    for higher in torch._ops._higher_order_ops.values():
        higher.fallthrough(KEY)
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if not base.startswith((*DRAWN, *DRAWN_WITHIN)):
            continue
        packet = getattr(getattr(torch.ops, namespace), base)
        operator = getattr(packet, overload or "default", None)
        if operator is not None and Tag.nondeterministic_seeded in operator.tags:
            if namespace not in libraries:
                libraries[namespace] = Library(namespace, "IMPL")
            libraries[namespace].impl(rest, kernel_of(operator), NAME)
    return [others, *libraries.values()]  # kernels are gone when these are


def kernel_of(operator: Any) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(KEY)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return handler_here()(operator, args, kwargs)

    return kernel


def handler_here() -> Handler:
    """The last one of this thread, or of any: a backward pass may have threads of its own."""
    here = get_ident()
    own = [handler for thread, handler in _entered if thread == here]
    return (own or [handler for _, handler in _entered])[-1]
