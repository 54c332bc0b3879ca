"""Data sets: files read and refused, public sets, and features that look at one record alone."""

from dpoptim.data.bundled import FASHION_MNIST_DIRECTORY, load_digits, load_fashion_mnist
from dpoptim.data.dataset import Data, Floats, Labels, hold_out_fifth
from dpoptim.data.tables import load_table
from dpoptim.data.text_features import encode_text
from dpoptim.data.views import views

__all__ = [
    "FASHION_MNIST_DIRECTORY",
    "Data",
    "Floats",
    "Labels",
    "encode_text",
    "hold_out_fifth",
    "load_digits",
    "load_fashion_mnist",
    "load_table",
    "views",
]
