"""Train on WebDataset's shards, one pass in the order in which they come: DP-FTRL samples nothing,
so nothing has to be read by index.
"""

import io
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import webdataset
from torch import Tensor, nn

import dpoptim

SHARDS, IN_EACH = 4, 250


def made_up(records: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, 8, generator=generator)
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).long()


def write_shards(folder: Path) -> list[str]:
    """Tar files of records: ``<key>.x.pth`` and ``<key>.y.cls``."""
    x, y = made_up(SHARDS * IN_EACH, seed=0)
    paths = [str(folder / f"shard-{i}.tar") for i in range(SHARDS)]
    for number, path in enumerate(paths):
        with webdataset.TarWriter(path) as shard:
            for i in range(number * IN_EACH, (number + 1) * IN_EACH):
                buffer = io.BytesIO()
                torch.save(x[i].clone(), buffer)
                key = f"{i:06d}"
                shard.write({"__key__": key, "x.pth": buffer.getvalue(), "y.cls": int(y[i])})
    return paths


def records(paths: list[str]) -> Iterator[tuple[Tensor, Any]]:
    """In the order of the shards, whatever they hold; no buffer shuffles them."""
    yield from webdataset.WebDataset(paths, shardshuffle=False).decode().to_tuple("x.pth", "y.cls")


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def main() -> float:
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    plan = dpoptim.DPFTRL(clip_norm=1.0, order="given").plan(
        n=SHARDS * IN_EACH,  # public: how many records the shards hold
        batch_size=50,
        epochs=1,
        epsilon=4.0,
        delta=1e-5,
        neighboring="zero-out",
    )
    with tempfile.TemporaryDirectory() as folder:
        stream = records(write_shards(Path(folder)))
        with dpoptim.attach(plan, model, optimizer, stream, loss=loss) as private:
            for batch in private.batches():
                private.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    x, y = made_up(500, seed=1)  # public
    accuracy = float((model(x).argmax(1) == y).float().mean())
    print(f"accuracy on public records {accuracy:.3f}, with {private.spent()}")
    return accuracy


if __name__ == "__main__":
    main()
