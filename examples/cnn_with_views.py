"""Train a small convolutional network on digits whose records are several shifted views, clipped
together.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.data import views

VIEWS = 4


def shifted(image: Tensor) -> Tensor:
    """The image moved by up to one pixel: a transform in one line, such as torchvision's."""
    return torch.roll(image, tuple(torch.randint(-1, 2, (2,)).tolist()), (1, 2))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """One value a row; the rows of a record are averaged, and its gradient is clipped once."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def main() -> float:
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(
        images / 16 - 0.5, labels, test_size=0.2, random_state=0, stratify=labels
    )
    x, x_public, y, y_public = (torch.as_tensor(part).float() for part in split)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    train_set = views(TensorDataset(x.view(-1, 1, 8, 8), y.long()), shifted, VIEWS)
    plan = dpoptim.DPSGD(clip_norm=0.5).plan(
        n=1_400, batch_size=350, epochs=15, epsilon=4.0, delta=1e-5
    )
    with dpoptim.attach(
        plan, model, optimizer, train_set, loss=loss, rows_per_record=VIEWS
    ) as private:
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        accuracy = float((model(x_public.view(-1, 1, 8, 8)).argmax(1) == y_public).float().mean())
    print(f"accuracy on public records {accuracy:.3f}, with {private.spent()}")
    return accuracy


if __name__ == "__main__":
    main()
