"""From the options of ``dpoptim train`` to the data set, encoded record by record."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dpoptim.data import (
    FASHION_MNIST_DIRECTORY,
    Data,
    hold_out_fifth,
    load_arrays,
    load_digits,
    load_fashion_mnist,
    load_table,
    read_schema,
    schema_without_file,
)
from dpoptim.data.preparation import (
    ChannelsFirst,
    Divide,
    OpponentColours,
    Scatter,
    SquareRoot,
    Step,
    UnitNorm,
    Whiten,
)
from dpoptim.data.schema import Schema
from dpoptim.data.table_files import is_table
from dpoptim.estimators.table import public_weights
from dpoptim.runs.models import GREY_PLANES
from dpoptim.runs.options import TrainRequest

BUNDLED = ("digits", "fashion-mnist")
SCATTERING = "scattering"
REGRESSION = "regression"
UNSCALED = (
    "Note: without public bounds each record is scaled to norm 1 by itself, which suits features "
    "of one unit only. Draft a schema with: dpoptim schema new {data} --target {target}"
)
LEAST_SIDE = 16  # pixels; views lost 5 points at 14 and 12 at 8, see docs/results.md
TOO_SMALL_FOR_VIEWS = (
    "Note: --views moves images by up to a pixel, which is much of a side of {side}: on images of "
    "8 x 8 and 14 x 14 views lost 5 to 12 points. Leave out --views."
)


def load_data(options: TrainRequest) -> Data:
    """Load the options' data set; public ones without a hold-out of their own lose a fifth to one.

    Raises:
        FileNotFoundError, ValueError: naming the file or option and the fix.
    """
    weights = options.weights_of_classes
    if options.data in BUNDLED:
        return with_class_weights(load_bundled(options), weights)
    path = Path(options.data)
    data = load_described(path, options) if is_table(path) else load_unnamed(path, options)
    if options.task is not None and (options.task == REGRESSION) != (
        data.target_bounds is not None
    ):
        raise ValueError(
            f"--task {options.task} does not fit the target. Fix: regression needs bounds of the "
            "target (in the schema, or --target-bounds), classification needs classes."
        )
    data = with_class_weights(data, weights)
    return hold_out_fifth(data, options.seed) if data.public and data.x_test is None else data


def with_class_weights(data: Data, weights: Mapping[str, float] | None) -> Data:
    """The data set with public weights of its classes, relative to the largest."""
    if weights is None:
        return data
    if data.target_bounds is not None:
        raise ValueError(
            "--class-weight is for classes, and this target is a number. Fix: leave it out."
        )
    if unknown := [name for name in weights if name not in data.class_names]:
        raise ValueError(
            f"--class-weight: there is no class {unknown[0]!r}. The classes are "
            f"{', '.join(data.class_names)}."
        )
    factors = public_weights(weights, np.asarray(data.class_names))
    return replace(data, class_weights=None if factors is None else tuple(factors.tolist()))


def load_bundled(options: TrainRequest) -> Data:
    names = ("target", "classes", "schema", "person_column", "target_bounds")
    refuse_given(options, names, f"is for a table of your own; {options.data} brings its labels.")
    steps = pixel_steps(options)
    if options.data == "digits":
        return load_digits(options.seed, steps, options.cache)
    return load_fashion_mnist(options.data_dir or FASHION_MNIST_DIRECTORY, steps, options.cache)


def refuse_given(options: TrainRequest, names: Sequence[str], why: str) -> None:
    """Refuse the first of these options that is given."""
    for name in names:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} {why}")


def pixel_steps(options: TrainRequest) -> tuple[Step, ...]:
    """Preparation of images with pixels in [0, 1]: fixed maps of each image alone."""
    evened = () if options.raw_pixels else (SquareRoot(),)
    return (*evened, *scattered_images(options)) if options.features == SCATTERING else evened


def scattered_images(options: TrainRequest) -> tuple[Step, ...]:
    """Scattering of brightness and differences of colours.

    Whitened for linear models, whose gradients are as long as their inputs, where there is one
    channel: made-up colour images lose by it.
    """
    features = (OpponentColours(), Scatter())
    return (*features, Whiten(most_planes=GREY_PLANES)) if options.model == "softmax" else features


def load_described(path: Path, options: TrainRequest) -> Data:
    """A table with named columns, by its schema."""
    if options.features is not None:
        raise ValueError(f"--features {options.features} is for images; {path} is a table.")
    schema = schema_of(path, options)
    return load_table(path, schema, public=options.data_is_public)


def schema_of(path: Path, options: TrainRequest) -> Schema:
    if options.schema is not None:
        why = f"is given twice: the schema {options.schema} describes the target."
        refuse_given(options, ("classes", "target_bounds"), why)
        return named_by_options(read_schema(options.schema), options)
    return schema_without_file(
        path,
        options.target,
        classes=options.class_names,
        target_bounds=options.bounds_of_target,
        public=options.data_is_public,
        person=options.person_column,
        regression=options.task == REGRESSION,
        scaling=None if options.normalise else "none",
    )


def named_by_options(schema: Schema, options: TrainRequest) -> Schema:
    """The schema, whose target and person must be those of the options where both name one."""
    named = (
        ("--target", options.target, None if schema.target is None else schema.target.name),
        ("--person-column", options.person_column, schema.person),
    )
    for option, given, described in named:
        if given is not None and given != described:
            raise ValueError(
                f"{option} {given} is not what the schema says ({described or 'none'}). Fix: "
                f"change the column's kind in {options.schema}."
            )
    return schema


def load_unnamed(path: Path, options: TrainRequest) -> Data:
    """Arrays without column names."""
    why = f"is for tables with named columns (.csv, .parquet, .arrow), not for {path}."
    refuse_given(options, ("schema", "person_column", "target_bounds"), why)
    return load_arrays(
        path,
        options.target,
        classes=options.class_names,
        public=options.data_is_public,
        pixels=(ChannelsFirst(), Divide(255.0), *pixel_steps(options)),
        numbers=number_steps(options),
        cache=options.cache,
    )


def number_steps(options: TrainRequest) -> tuple[Step, ...]:
    if options.features == SCATTERING:
        return (ChannelsFirst(), *scattered_images(options))
    return (UnitNorm(),) if options.normalise else ()


def describe_encoding(data: Data) -> str:
    """How features were made, for reports."""
    if isinstance(data.encoding, Schema):
        return {
            "bounds": "numbers scaled by public bounds, categories one by one",
            "unit-norm": "each record scaled to norm 1 by itself",
            "none": "as in the file",
        }[data.encoding.scaling]
    return "as in the file" if data.encoding is None else data.encoding.describe()


def warnings_for_owner(data: Data, options: TrainRequest) -> Iterator[str]:
    """Warnings to the owner of the data before the budget is spent, from what is public."""
    by_itself = isinstance(data.encoding, Schema) and data.encoding.scaling == "unit-norm"
    if by_itself and options.schema is None:
        yield UNSCALED.format(data=options.data, target=options.target)
    shortest = min(data.x.shape[2:]) if data.x.ndim == 4 else LEAST_SIDE
    if options.views > 1 and shortest < LEAST_SIDE:
        yield TOO_SMALL_FOR_VIEWS.format(side=shortest)
