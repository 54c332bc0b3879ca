"""Operators that draw random numbers are run by a handler, in one thread for a while; no others."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dpoptim.runtime.dispatch_internals import drawing_operators_run_by
from dpoptim.training.trials.fixed_noise import FixedNoise


@contextmanager
def seen(value: float = 1.0) -> Iterator[list[str]]:
    """Names of the operators that drew, of which all drew this."""
    names: list[str] = []

    def look(operator: Any, args: Any, kwargs: Any) -> Any:
        names.append(operator.__name__)
        return operator(*args, **kwargs).fill_(value)

    with drawing_operators_run_by(look):
        yield names


def test_only_what_draws_is_asked_and_only_meanwhile() -> None:
    with seen() as names:
        x = torch.rand(3, 2) @ torch.randn(2, 4) + torch.empty(4).normal_()
        assert torch.equal(x, torch.full((3, 4), 3.0))
    assert names == ["rand.default", "randn.default", "normal_.default"]
    assert len({*torch.rand(9).tolist()}) > 1
    assert len(names) == 3


def test_backward_passes_that_run_a_block_again_draw_the_same() -> None:
    x = torch.ones(4, requires_grad=True)
    with seen() as names:
        y: Any = checkpoint(lambda x: F.dropout(x, 0.5) * x, x, use_reentrant=False)
        (g,) = torch.autograd.grad(y.sum(), x)
    assert names == ["bernoulli_.float"] * 2
    assert torch.equal(g, torch.full((4,), 4.0))


def test_vectorised_functions_draw_for_all_records_at_once() -> None:
    shapes: list[torch.Size] = []

    def look(operator: Any, args: Any, kwargs: Any) -> Any:
        drawn = operator(*args, **kwargs)
        shapes.append(drawn.shape)
        return drawn

    with drawing_operators_run_by(look):
        torch.func.vmap(lambda x: x + torch.randn(2), randomness="different")(torch.zeros(5, 2))
    assert shapes == [torch.Size((5, 2))]


def test_the_last_handler_counts_and_other_threads_have_none() -> None:
    elsewhere: list[Tensor] = []
    with seen(1.0) as outer:
        with seen(2.0) as inner:
            assert float(torch.rand(())) == 2.0
            thread = threading.Thread(target=lambda: elsewhere.append(torch.rand(8)))
            thread.start()
            thread.join()
        assert float(torch.rand(())) == 1.0
    assert (len(outer), len(inner)) == (1, 1)
    assert len({*elsewhere[0].tolist()}) > 1


def test_an_error_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), seen() as names:
        raise ZeroDivisionError
    torch.rand(2)
    assert names == []


def test_what_is_compiled_runs_eagerly_under_fixed_noise() -> None:
    compiled: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        compiled.append(module)
        return module.forward

    function: Any = torch.compile(lambda x: x + torch.rand(3), backend=backend)
    with FixedNoise(0.5):
        first, second = function(torch.zeros(3)), function(torch.zeros(3))
    assert torch.equal(first, second)
    assert not compiled
    function(torch.zeros(3))
    assert compiled
    torch._dynamo.reset()


def test_operators_of_higher_order_pass() -> None:
    attention = pytest.importorskip("torch.nn.attention.flex_attention")
    q = torch.ones(1, 1, 4, 4)
    with seen() as names, pytest.warns(UserWarning, match="without torch.compile"):
        out = attention.flex_attention(q, q, q)
    assert out.shape == q.shape
    assert names == []
