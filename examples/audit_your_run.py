"""Plant canaries in a training of your own, and see what an attacker can certify of epsilon."""

import torch
import torch.nn.functional as F
from torch import nn

import dpoptim
from dpoptim.audit import attached_run, one_run

CANARIES, FEATURES = 400, 400


def main() -> str:
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 10)
    # as visible as records can be
    canaries = (torch.eye(FEATURES)[:CANARIES] * 4, torch.randint(0, 10, (CANARIES,)))
    others = (torch.randn(200, FEATURES) / 20, torch.randint(0, 10, (200,)))
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=400, batch_size=200, steps=20, epsilon=4.0, delta=1e-5
    )

    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores, labels, reduction="none")

    result = one_run(attached_run(plan, model, loss, canaries, others), CANARIES, plan, seed=0)
    print(result)
    return result.verdict


if __name__ == "__main__":
    main()
