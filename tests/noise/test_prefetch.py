"""What is drawn ahead is what would have been drawn, and serves once."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.audit.noise import audit_noise
from dpoptim.noise import KeyStream, gaussian
from dpoptim.noise.gaussian import add_normal, draw_normal_ahead
from dpoptim.noise.prefetch import DrawnAhead
from forked import in_forked_child, needs_fork

N = 20_000


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def noisy(stream: KeyStream, *shapes: int, ahead: bool = True, dtype=torch.float64) -> list[Tensor]:
    """Three steps' sums of these sizes, joined as one vector, with noise."""
    steps = []
    for _ in range(3):
        steps += (sums := [torch.linspace(-1, 1, n, dtype=dtype) for n in shapes])
        add_normal(stream, sums, 0.7)
        if ahead:
            draw_normal_ahead(stream, [sums])
    return steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shapes", [(N,), (N, 3, 16_384, 100), (1 << 20,), ((1 << 20) + 1,), (5,)])
def test_the_same_bits(shapes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also where vectors are too long or too short for it."""
    found = [
        noisy(KeyStream.from_seed(1, "noise"), *shapes, ahead=ahead, dtype=dtype)
        for ahead in (False, True)
    ]
    assert all(map(torch.equal, *found))


def test_one_thread_draws_nothing_ahead() -> None:
    torch.set_num_threads(1)
    stream = KeyStream()
    noisy(stream, N)
    assert not stream.reserved


def test_without_a_spare_thread_the_same_bits() -> None:
    """A process may not start threads, or is about to end."""
    expected = noisy(KeyStream.from_seed(1, "noise"), N, ahead=False)
    with patch.object(ThreadPoolExecutor, "submit", side_effect=RuntimeError("no threads")):
        assert all(map(torch.equal, noisy(KeyStream.from_seed(1, "noise"), N), expected))


def test_reserved_branches_keep_their_turns() -> None:
    streams = [KeyStream.from_seed(1, "noise") for _ in range(2)]
    for _ in range(2):
        streams[0].reserve()
    for _ in range(4):
        words = [bytearray(64) for _ in streams]
        for stream, each in zip(streams, words, strict=True):
            stream.branch().fill(each)
        assert words[0] == words[1]


def test_a_resumed_run_draws_what_was_not_used() -> None:
    """Draws that wait when a seeded run is saved are those of its next step."""
    stream, resumed = (KeyStream.from_seed(1, "noise") for _ in range(2))
    noisy(stream, N)
    assert stream.reserved
    resumed.skip_to(*stream.reached)
    again = KeyStream.from_seed(1, "noise")
    again.reserve()
    again.skip_to(*stream.reached)  # what it had reserved is behind it
    expected, *others = (noisy(each, N) for each in (stream, resumed, again))
    for other in others:
        assert all(map(torch.equal, expected, other))


def test_an_interrupted_step_loses_its_draws() -> None:
    """They may have been added in part, and seen: the step that is done again gets others."""
    stream, failed = KeyStream(), torch.zeros(N, dtype=torch.float64)
    parts = [*failed.split(N // 2)]
    add_normal(stream, torch.zeros(N), 1.0)
    draw_normal_ahead(stream, [parts])

    honest, calls = gaussian._put, []

    def interrupted(*args: object) -> None:
        if threading.current_thread() is threading.main_thread():
            calls.append(args)
            if len(calls) > 1:
                raise KeyboardInterrupt
        honest(*args)

    with patch.object(gaussian, "_put", interrupted), pytest.raises(KeyboardInterrupt):
        add_normal(stream, parts, 1.0)
    again = torch.zeros(N, dtype=torch.float64)
    add_normal(stream, again, 1.0)
    there = failed != 0
    assert 0 < there.sum() < N
    assert (again != 0).all()
    assert not (again[there] == failed[there]).any()


def test_other_sizes_get_other_draws() -> None:
    stream = KeyStream()
    seen = [torch.zeros(n, dtype=torch.float64) for n in (N, N + 1, N - 1, N)]
    for sums in seen:
        add_normal(stream, sums, 1.0)
        draw_normal_ahead(stream, [[sums]])
    every = torch.cat(seen)
    assert len(every.unique()) == len(every)


@needs_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("seeded", [False, True])
def test_a_forked_child_has_none_of_them(seeded: bool) -> None:
    stream = KeyStream.from_seed(1, "noise") if seeded else KeyStream()
    draw_normal_ahead(stream, [[torch.zeros(N)]])

    def child() -> bytes:
        mine = torch.zeros(N, dtype=torch.float64)
        try:
            add_normal(stream, mine, 1.0)
        except RuntimeError:
            return b"refused"
        return mine[:1000].numpy().tobytes()

    answers = [in_forked_child(child) for _ in range(2)]
    if seeded:
        assert answers == [b"refused"] * 2
        return
    parents = torch.zeros(N, dtype=torch.float64)
    add_normal(stream, parents, 1.0)
    children = [torch.frombuffer(bytearray(each), dtype=torch.float64) for each in answers]
    every = torch.cat([*children, parents])
    assert len(every) == 2 * 1000 + N
    assert len(every.unique()) == len(every)


def trained(steps: int) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(300, 20)
    data = TensorDataset(torch.randn(64, 300), torch.randint(20, (64,)))
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=64, batch_size=16, steps=steps, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(
        plan, model, optimizer, data, ledger=dpoptim.Ledger(), noise_seed=1
    ) as private:
        for x, y in private.batches():
            private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            optimizer.zero_grad()
        assert not private._steps.gate._noise.reserved  # none that no step will want
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore:.*seed")
def test_a_seeded_run_repeats_with_and_without() -> None:
    taken = []
    honest = DrawnAhead.take

    def take(self: DrawnAhead, branch: KeyStream, size: int) -> Tensor | None:
        taken.append(honest(self, branch, size))
        return taken[-1]

    with patch.object(DrawnAhead, "take", take):
        ahead = trained(5)
    assert [drawn is not None for drawn in taken] == [False, True, True, True, True]
    with patch.object(gaussian, "_LEAST_AHEAD", 1 << 60):
        assert torch.equal(trained(5), ahead)


def test_the_noise_audit_passes() -> None:
    assert audit_noise(noise_seed=1).verdict == "consistent"
