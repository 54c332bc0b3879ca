"""Train in two processes: the loop is that of one. Run it by itself, or with torchrun
--nproc-per-node N.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import dpoptim


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same first weights and made-up data on every rank
    x = torch.randn(2_000, 20)
    data = TensorDataset(x, (x @ torch.randn(20, 3)).argmax(1))
    model = DistributedDataParallel(nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=2_000, batch_size=200, epochs=5, epsilon=4.0, delta=1e-5
    )
    with dpoptim.attach(plan, model, optimizer, data, loss=loss) as private:
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} processes, one charge: {private.spent()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                __file__,
            ],
            check=True,
        )
