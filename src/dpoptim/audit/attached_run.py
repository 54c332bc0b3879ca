"""A run for `one_run` through `attach`, and the scores of an attacker who sees every step."""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils.data import TensorDataset

from dpoptim.audit.bounds import Floats
from dpoptim.audit.one_run import Coins
from dpoptim.gradients.layers.torch_func import called_with
from dpoptim.plan import Plan
from dpoptim.training.attach import attach_own


def attached_run(
    plan: Plan,
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    canaries: Sequence[Tensor],
    others: Sequence[Tensor] | None = None,
    *,
    learning_rate: float = 0.1,
    noise_seed: int | None = None,
) -> Callable[[Coins], Floats]:
    """A run for `one_run`: SGD through `attach`, watched by an attacker who sees every step.

    A canary's score is the inner product of its clipped gradient with each step's noisy sum, added
    up over steps: what it would have put there. Models with many more parameters than canaries
    show most.

    Args:
        plan: DP-SGD under add-or-remove-one, or any plan under zero-out (then n counts all
            canaries).
        model: is copied.
        loss: maps (output, target) to one number for each record, shape (B,).
        canaries, others: (inputs, targets), records on the first axis: the canaries, and the data
            they hide among.
        learning_rate: of SGD.
        noise_seed: as for ``attach``.

    Returns:
        a function of the coins that `one_run` calls.

    Examples:
        >>> import torch
        >>> import dpoptim
        >>> from dpoptim.audit import attached_run, one_run
        >>> plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        ...     n=64, batch_size=32, steps=5, epsilon=4.0, delta=1e-5, neighboring="zero-out"
        ... )
        >>> canaries = torch.eye(64, 80), torch.zeros(64, dtype=torch.long)
        >>> loss = torch.nn.CrossEntropyLoss(reduction="none")
        >>> run = attached_run(plan, torch.nn.Linear(80, 2), loss, canaries)
    """
    x, y = (torch.as_tensor(part) for part in canaries)
    rest = (
        (x[:0], y[:0])
        if others is None
        else (torch.as_tensor(others[0]), torch.as_tensor(others[1]))
    )

    def run(present: Coins) -> Floats:
        kept = torch.from_numpy(present)
        if plan.neighboring == "add-or-remove-one":
            inputs, targets = torch.cat([x[kept], rest[0]]), torch.cat([y[kept], rest[1]])
            weights = torch.ones(len(inputs))
        else:
            inputs, targets = torch.cat([x, rest[0]]), torch.cat([y, rest[1]])
            weights = torch.cat([kept.float(), torch.ones(len(rest[0]))])
        trained, probe = copy.deepcopy(model), copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=learning_rate)
        scores = np.zeros(len(present))
        data = TensorDataset(inputs, targets, weights)
        with attach_own(
            plan, trained, optimizer, data, noise_seed=noise_seed, label="audit"
        ) as private:
            for bx, by, weight in private.batches():
                before = flat(trained)
                private.backward(loss(trained(bx), by) * weight)
                optimizer.step()
                expected = plan.expected_batch(private.steps_done - 1)
                noisy = (before - flat(trained)) * (expected / learning_rate)
                scores += alignment(probe, before, loss, (x, y), noisy, plan.method.rule.norm)
        return scores

    return run


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters() if p.requires_grad])


def alignment(
    model: nn.Module,
    at: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    records: Sequence[Tensor],
    to: Tensor,
    norm: float,
) -> Floats:
    """Inner products of records' clipped gradients, at parameters ``at``, with ``to``; (m,)."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parts = at.split([p.numel() for p in trainable.values()])
    weights = {
        name: part.view(p.shape).to(p.dtype)
        for (name, p), part in zip(trainable.items(), parts, strict=True)
    }

    def one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(called_with(model, weights, (x[None],)), y[None]).sum()

    scores = []
    for x, y in zip(records[0].split(128), records[1].split(128), strict=True):
        gradients = vmap(grad(one), in_dims=(None, 0, 0))(weights, x, y)
        rows = torch.cat([gradients[name].flatten(1).double() for name in trainable], 1)
        length = torch.linalg.vector_norm(rows, dim=1)
        scores.append((rows @ to) / torch.clamp(length / norm, min=1.0))
    return np.asarray(torch.cat(scores).numpy())
