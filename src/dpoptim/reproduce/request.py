"""A request for an experiment: where to write, how much, and the folders of data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# What the folder of each option holds: the command's help, and the end of every error about it.
FOLDERS = {
    "tweets": "a folder of a TweetEval task such as emotion or emoji",
    "e2e": "the folder of the E2E challenge's data: devset.csv and testset_w_refs.csv; with a "
    "model trainset.csv and testset_w_refs.csv",
    "features": "a folder of data sets, each NAME.npz with arrays x_train, y_train, x_test and "
    "y_test, or a folder NAME of such .npy files; the paper's figures stand beside caltech-256, "
    "food-101, cifar-100 and cifar-10",
    "emnist": "the folder of EMNIST's IDX files, gzipped or not: "
    "emnist-balanced-train-images-idx3-ubyte, emnist-balanced-train-labels-idx1-ubyte, and the "
    "same two of test",
    "cifar": "the folder of CIFAR-10's or CIFAR-100's Python pickles (data_batch_1, ..., "
    "test_batch; or train, test), or of pictures of one size sorted as train/CLASS/*.png and "
    "test/CLASS/*.png",
    "model": "a folder that save_pretrained of Hugging Face's transformers wrote: of a ViT for "
    "dice-vit, of GPT-2 and its tokenizer for dice-table3",
}


def fashion_folder() -> Path:
    """Return where Fashion-MNIST usually is."""
    from dpoptim.data import FASHION_MNIST_DIRECTORY

    return Path(FASHION_MNIST_DIRECTORY)


@dataclass(frozen=True)
class Request:
    """Where to write, how much to run, and where data sets are that do not come with a package.

    Attributes:
        out: folder for tables (CSV) and pictures.
        quick: fewer settings and seeds.
        fashion, tweets, e2e: folders of Fashion-MNIST, of a TweetEval task (or, for
            ``das-baselines``, of several), and of the E2E challenge; None: not there.
        features, emnist, cifar, model: folders of the reader's own, see `FOLDERS`; None: not there.
        device: of a model that the reader brings, such as "cuda".
        say: told in a line what is left out, and why.
    """

    out: Path
    quick: bool = False
    fashion: Path = field(default_factory=fashion_folder)
    tweets: Path | None = None
    e2e: Path | None = None
    features: Path | None = None
    emnist: Path | None = None
    cifar: Path | None = None
    model: Path | None = None
    device: str = "cpu"
    say: Callable[[str], None] = print

    @property
    def seeds(self) -> int:
        return 1 if self.quick else 3

    def needed(self, option: str, by: str) -> Path:
        """The folder that an option gives.

        Raises:
            ValueError: it was not given. FileNotFoundError: it is not there.
        """
        folder: Path | None = getattr(self, option)
        if folder is None:
            raise ValueError(f"{by} needs --{option}, {FOLDERS[option]}.")
        if not folder.is_dir():
            raise FileNotFoundError(f"--{option}: {folder} is no folder. Give {FOLDERS[option]}.")
        return folder
