"""Train on handwritten digits in a loop of your own, with a guarantee, and score on a public
hold-out.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """One value a record."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def main() -> float:
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(
        images / 16 - 0.5, labels, test_size=0.2, random_state=0, stratify=labels
    )
    x, x_public, y, y_public = (torch.as_tensor(part).float() for part in split)
    train_set = TensorDataset(x, y.long())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

    # 1,400 is what everybody knows of the data; the exact number of records is private.
    plan = dpoptim.DPSGD(clip_norm=0.5).plan(
        n=1_400, batch_size=350, epochs=30, epsilon=4.0, delta=1e-5
    )
    with dpoptim.attach(plan, model, optimizer, train_set, loss=loss) as private:
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        accuracy = float((model(x_public).argmax(1) == y_public).float().mean())
    print(f"accuracy on public records {accuracy:.3f}, with {private.spent()}")
    return accuracy


if __name__ == "__main__":
    main()
