"""per_sample_mean: one term per record."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpoptim.losses import per_sample_mean


def test_it_is_the_mean_of_the_records_means() -> None:
    losses = torch.tensor([[1.0, 3.0, 100.0], [2.0, 50.0, 50.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert per_sample_mean(losses, mask).tolist() == [2.0, 2.0]
    assert per_sample_mean(losses, mask.bool()).tolist() == [2.0, 2.0]
    torch.testing.assert_close(per_sample_mean(losses), losses.mean(1))


@given(st.integers(0, 2**31), st.integers(1, 6))
def test_a_record_counts_the_same_in_any_company(seed: int, tokens: int) -> None:
    """Falsify the guarantee: the others' masks and losses must not move a record's gradient."""
    generator = torch.Generator().manual_seed(seed)
    own, mask = (
        torch.randn(1, tokens, generator=generator),
        torch.rand(1, tokens, generator=generator) > 0.4,
    )
    gradients = []
    for _ in range(2):
        others = torch.randn(3, tokens, generator=generator) * 1e6
        losses = torch.cat([own, others]).requires_grad_()
        all_masks = torch.cat([mask, torch.rand(3, tokens, generator=generator) > 0.5])
        gradients.append(
            torch.autograd.grad(per_sample_mean(losses, all_masks).sum(), losses)[0][0]
        )
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_what_is_masked_may_be_anything() -> None:
    losses = torch.tensor([[1.0, float("nan")], [float("inf"), 3.0]], requires_grad=True)
    means = per_sample_mean(losses, torch.tensor([[True, False], [False, True]]))
    assert means.tolist() == [1.0, 3.0]
    means.sum().backward()
    assert torch.equal(losses.grad, torch.eye(2))


def test_records_without_tokens_and_empty_batches_have_loss_zero() -> None:
    assert per_sample_mean(torch.ones(2, 3), torch.tensor([[0, 0, 0], [1, 1, 1]])).tolist() == [
        0.0,
        1.0,
    ]
    assert per_sample_mean(torch.ones(0, 3)).tolist() == []


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match='reduction="none"'):
        per_sample_mean(torch.ones(5))
    with pytest.raises(ValueError, match="mask must have the shape"):
        per_sample_mean(torch.ones(5, 2), torch.ones(5))
