"""Worker threads: every call once, on one thread, and what it raises is heard."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from dpoptim.runtime import worker_threads as module
from dpoptim.runtime.worker_threads import worker_threads


@pytest.fixture(params=["team", "pool"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "pool":
        monkeypatch.setattr(module, "parallel_region", lambda: None)
    elif module.parallel_region() is None:
        pytest.skip("this PyTorch has no threads of OpenMP")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_call_runs_once_without_gradients(number: int) -> None:
    seen: list[tuple[int, bool]] = []
    with worker_threads(number) as run:
        for _ in range(20):
            run([lambda i=i: seen.append((i, torch.is_grad_enabled())) for i in range(7)])
    assert sorted(seen) == sorted((i, False) for i in range(7) for _ in range(20))
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("error", [IndexError, StopIteration, KeyboardInterrupt])
def test_what_a_call_raises_is_raised(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("here")

    with pytest.raises(error, match="here"), worker_threads(2) as run:
        run([lambda: None, fail, lambda: None])


@pytest.mark.usefixtures("threads")
def test_a_product_is_rounded_as_by_one_thread() -> None:
    """Divided among threads, sums over ten thousand numbers would be rounded in another order."""
    left, right = torch.randn(2, 10_000), torch.randn(10_000, 3)

    def products() -> list[Tensor]:
        found: list[Tensor] = []

        def multiply() -> None:
            found.append(torch.cat([left @ right, left.sum(1, keepdim=True)], 1))

        with worker_threads(1) as run:
            run([multiply])
            run([partial(multiply), partial(multiply)])
        return found

    divided = products()
    torch.set_num_threads(1)
    (alone, *_) = products()
    assert all(torch.equal(each, alone) for each in divided)
