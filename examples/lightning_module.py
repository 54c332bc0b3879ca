"""Train a LightningModule privately: its training_step returns one loss a record."""

import logging
import tempfile

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpoptim
from dpoptim.integrations.lightning import PrivateCallback


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        # Lightning never sees it: it is private
        return F.cross_entropy(self.net(x), y, reduction="none")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())  # on public records

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> float:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    x = torch.randn(2_500, 20)
    y = (x @ torch.randn(20, 3)).argmax(1)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=2_000, batch_size=200, epochs=10, epsilon=4.0, delta=1e-5
    )
    private = PrivateCallback(plan, TensorDataset(x[:2_000], y[:2_000]), physical_batch_size=128)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=10, callbacks=[private], logger=False, enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, accelerator="cpu",
        )  # fmt: skip
        public = DataLoader(TensorDataset(x[2_000:], y[2_000:]), batch_size=500)
        trainer.fit(Classifier(), private.loader, public)
    accuracy = float(trainer.callback_metrics["accuracy"])
    print(f"accuracy on public records {accuracy:.3f}, with {private.private.spent()}")
    return accuracy


if __name__ == "__main__":
    main()
