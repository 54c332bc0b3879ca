"""Opacus under a two-world sensitivity attack: does one record move the clipped sum by more than
the clip norm?

Needs opacus; noise off. Two models: a plain layer, and one whose weight is used a second time as
``F.linear(x, weight)``, which per-layer hooks do not see. Each is asked for the clipped sums of
all records and of all but one.

    python benchmarks/audit_peers.py --out benchmarks/results/audit_peers.csv
"""

import argparse
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saving import save_csv

CLIP_NORM, RECORDS = 1.0, 8


class Plain(nn.Module):
    """Each weight is used by its layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Functional(Plain):
    """The weight is used twice, once behind the layer's back."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(100 * x, self.layer.weight)


def opacus_sum(model: nn.Module, x: Tensor, target: Tensor, mode: str) -> Tensor:
    """The weight's gradient after Opacus' clipping and before its noise, as a sum over records."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    data = DataLoader(TensorDataset(x, target), batch_size=len(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=data,
        noise_multiplier=0.0,
        max_grad_norm=CLIP_NORM,
        poisson_sampling=False,
        loss_reduction="sum",
        grad_sample_mode=mode,
        **({"criterion": nn.CrossEntropyLoss(reduction="sum")} if mode == "ghost" else {}),
    )
    module, optimizer = made[0], made[1]
    before = module._module.layer.weight.detach().clone()
    optimizer.zero_grad()
    if mode == "ghost":
        made[2](module(x), target).backward()
    else:
        F.cross_entropy(module(x), target, reduction="sum").backward()
    optimizer.step()
    return before - module._module.layer.weight.detach()


def dpoptim_sum(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """The same through dpoptim's engine."""
    from dpoptim.audit.sensitivity import clipped_sums
    from dpoptim.clipping import Clipping

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    return clipped_sums(model, (x, target), loss, Clipping(CLIP_NORM), capacity=RECORDS)[0].view(
        3, 4
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/audit_peers.csv"))
    out = parser.parse_args().out
    warnings.simplefilter("ignore")
    rows = []
    for use, build in (("plain", Plain), ("functional second use", Functional)):
        for library in ("opacus hooks", "opacus ghost", "dpoptim"):
            torch.manual_seed(0)
            model = build()
            start = {name: value.clone() for name, value in model.state_dict().items()}
            x = torch.randn(RECORDS, 4)
            y = model(x).argmin(1)  # the worst label, so that no gradient vanishes
            sums, refusal = [], ""
            for part, target in ((x, y), (x[:-1], y[:-1])):
                fresh = build()
                fresh.load_state_dict(start)
                try:
                    if library == "dpoptim":
                        sums.append(dpoptim_sum(fresh, part, target).double())
                    else:
                        sums.append(opacus_sum(fresh, part, target, library.split()[1]).double())
                except Exception as error:  # a refusal is a right answer
                    refusal = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
                    break
            moved = "" if refusal else f"{float((sums[0] - sums[1]).norm()) / CLIP_NORM:.4g}"
            verdict = (
                "refused" if refusal else ("refuted" if float(moved) > 1.0001 else "consistent")
            )
            rows.append(
                {
                    "library": library,
                    "use": use,
                    "moved_in_clip_norms": moved,
                    "verdict": verdict,
                    "error": refusal,
                }
            )
            print(*rows[-1].values(), sep=" | ")
    save_csv(rows, out)


if __name__ == "__main__":
    main()
