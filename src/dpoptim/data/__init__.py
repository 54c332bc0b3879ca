"""Data sets: files read and refused, public sets, and features that look at one record alone."""

from dpoptim.data.arrays import load_arrays
from dpoptim.data.bundled import FASHION_MNIST_DIRECTORY, load_digits, load_fashion_mnist
from dpoptim.data.dataset import Data, Floats, Labels, hold_out_fifth
from dpoptim.data.parquet_rows import ParquetRows
from dpoptim.data.preparation import Preparation
from dpoptim.data.schema import Column, Schema, parse_schema, read_schema
from dpoptim.data.tables import load_table, schema_without_file
from dpoptim.data.text_features import encode_text
from dpoptim.data.views import views

__all__ = [
    "FASHION_MNIST_DIRECTORY",
    "Column",
    "Data",
    "Floats",
    "Labels",
    "ParquetRows",
    "Preparation",
    "Schema",
    "encode_text",
    "hold_out_fifth",
    "load_arrays",
    "load_digits",
    "load_fashion_mnist",
    "load_table",
    "parse_schema",
    "read_schema",
    "schema_without_file",
    "views",
]
