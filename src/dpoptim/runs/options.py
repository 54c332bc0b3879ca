"""The options of ``dpoptim train``, each declared once: type, default and help."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from dpoptim.iterate import Iterate
from dpoptim.optimizers import OPTIMIZERS
from dpoptim.registry import method_names

Relation = Literal["add-or-remove-one", "zero-out", "replace-one"]  # which data sets are neighbours
ModelName = Literal["softmax", "mlp", "cnn"]

# Options that several commands take, each declared once.
DataDirOption = Annotated[Path | None, typer.Option(help="Of Fashion-MNIST; default Debian's.")]
SchemaOption = Annotated[
    Path | None,
    typer.Option(
        help="Public description of a table's columns (TOML); dpoptim schema new drafts one."
    ),
]
TargetOption = Annotated[
    str | None, typer.Option(help="Label column of a table, or array (.npz, default y).")
]
TaskOption = Annotated[
    Literal["classification", "regression"] | None,
    typer.Option(help="Default: what the target's description says."),
]
TargetBoundsOption = Annotated[
    str | None,
    typer.Option(help="LOWEST,HIGHEST of a number to predict, without a schema; public."),
]
ClassesOption = Annotated[
    str | None,
    typer.Option(
        help="Labels that may occur, comma-separated: a public list. Needed unless the data is "
        "public."
    ),
]
ModelOption = Annotated[ModelName, typer.Option(help="What to train.")]
LedgerOption = Annotated[
    Path | None,
    typer.Option(help="Ledger file of these records; charged before anything is drawn."),
]
DatasetOption = Annotated[
    str | None,
    typer.Option(
        help="The ledger's name for these records; default the file's name. Needed where the file "
        "is called otherwise than when the ledger was made."
    ),
]
BudgetOption = Annotated[
    str | None, typer.Option(help="Total budget of a new ledger over all runs: EPSILON,DELTA.")
]
NoiseSeedOption = Annotated[
    int | None,
    typer.Option(help="Repeatable noise, for tests; the guarantee is then not for release."),
]
RunArgument = Annotated[
    Path, typer.Argument(help="Run directory of dpoptim train, or its model.pt.")
]
SettingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="A setting of the method; repeat for several."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
ClassWeightOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CLASS=WEIGHT",
        help="How much records of a class count, beside the heaviest; public; repeat for several. "
        "Others have 1.",
    ),
]
PersonColumnOption = Annotated[
    str | None, typer.Option(help="Whose record each is; the guarantee then protects persons.")
]
OptimizerOption = Annotated[
    str,
    typer.Option(
        help=f"What moves the model by the noisy gradients: {', '.join(OPTIMIZERS)}.",
        show_default=True,
    ),
]
ROWS_OF_PERSON = 16
RecordsPerPersonOption = Annotated[
    int,
    typer.Option(
        help="At most so many of a person's records take part in a step, chosen by chance.", min=1
    ),
]


@dataclass(frozen=True)
class TrainRequest:
    """The options as given; None where the default is to be worked out."""

    data: Annotated[
        str,
        typer.Option(
            help="digits, fashion-mnist, a table (.csv, .csv.gz, .parquet, .arrow), "
            ".npz, or a folder of images."
        ),
    ] = "digits"
    data_dir: DataDirOption = None
    schema: SchemaOption = None
    target: TargetOption = None
    task: TaskOption = None
    target_bounds: TargetBoundsOption = None
    classes: ClassesOption = None
    class_weight: ClassWeightOption = None
    data_is_public: Annotated[
        bool,
        typer.Option(
            "--data-is-public", help="Allow scores and the comparison; the bundled sets are public."
        ),
    ] = False
    person_column: PersonColumnOption = None
    records_per_person: RecordsPerPersonOption = ROWS_OF_PERSON
    features: Annotated[
        Literal["scattering"] | None,
        typer.Option(help="Of images: scattering, which no data has taught."),
    ] = None
    views: Annotated[
        int,
        typer.Option(
            help="Views of each image a step, moved by up to a pixel and clipped as one: for "
            "images that lie about, as handwriting does.",
            min=1,
        ),
    ] = 1
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder in which features of images are kept, for their owner alone."),
    ] = None
    n: Annotated[
        int | None,
        typer.Option(
            "--n",
            help="Nominal number of records (of persons, with --person-column), public; needed "
            "for add-or-remove-one.",
            min=1,
        ),
    ] = None
    normalise: Annotated[
        bool,
        typer.Option(help="Scale each record of a table to norm 1 (looks at that record alone)."),
    ] = True
    raw_pixels: Annotated[
        bool, typer.Option("--raw-pixels", help="Images as they are, not sqrt(pixel) - 0.4.")
    ] = False
    model: ModelOption = "softmax"
    method: Annotated[
        str,
        typer.Option(
            help=f"Training algorithm: {', '.join(method_names())}. Default: dp-sgd; for linear "
            "models of numbers momentum-gd or sufficient-statistics, which find their range."
        ),
    ] = "auto"
    setting: SettingOption = None
    single_pass: Annotated[
        bool,
        typer.Option(
            "--single-pass", help="See every record once, in order (accelerated-srgd or dp-ftrl)."
        ),
    ] = False
    epsilon: Annotated[
        float | None, typer.Option(help="Budget; or give --noise-multiplier. Default 2.")
    ] = None
    delta: Annotated[
        float | None,
        typer.Option(
            help="Failure probability; default 1e-5, and at most 1/(10 n) but for bundled sets."
        ),
    ] = None
    noise_multiplier: Annotated[float | None, typer.Option(help="Instead of --epsilon.")] = None
    neighboring: Annotated[
        Relation | None,
        typer.Option(
            help="Default: the ledger's; of a new one add-or-remove-one where n is public (--n, "
            "bundled sets), else zero-out."
        ),
    ] = None
    clip_norm: Annotated[float | None, typer.Option(help="Bound on each record's gradient.")] = None
    clip_quantile: Annotated[
        float | None,
        typer.Option(
            help="Find the bound privately instead: this quantile of the norms; within the budget."
        ),
    ] = None
    clipping: Annotated[
        Literal["flat", "automatic", "per-layer"], typer.Option(help="How the bound is kept.")
    ] = "flat"
    batch_size: Annotated[int | None, typer.Option(help="Expected batch size.", min=1)] = None
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None
    optimizer: OptimizerOption = "sgd"
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the optimizer; default: from public numbers.")
    ] = None
    momentum: Annotated[float | None, typer.Option(help="Of sgd; default 0.9.")] = None
    betas: Annotated[
        str | None,
        typer.Option(metavar="BETA1,BETA2", help="Of adam and adam_bc; default 0.9,0.999."),
    ] = None
    iterate: Annotated[
        Iterate,
        typer.Option(
            help="Which one is the model: a mean of the last ones, the last, or by chance."
        ),
    ] = "average"
    projection: Annotated[
        float | None,
        typer.Option(help="Radius of a ball around the start that holds the weights at each step."),
    ] = None
    physical_batch_size: Annotated[
        int | None, typer.Option(help="Rows at a time that memory holds.", min=1)
    ] = None
    seed: Annotated[int, typer.Option(help="Initialisation and splits; never the noise.")] = 0
    noise_seed: NoiseSeedOption = None
    ledger: LedgerOption = None
    dataset: DatasetOption = None
    budget: BudgetOption = None
    vouched_by: Annotated[
        str | None,
        typer.Option(help="Who vouches for what the certificate takes on trust, by name."),
    ] = None
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare", help="Also train without privacy (public data only)."
        ),
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="Run directory; default runs/DATA-MODEL-TIME.")
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the interrupted run in --out, on its own charge; same options.",
        ),
    ] = False
    save_every: Annotated[
        float,
        typer.Option(
            help="Minutes between two saves of an unfinished run, the first before its charge.",
            min=0,
        ),
    ] = 10.0
    max_time: Annotated[
        float | None,
        typer.Option(
            help="Minutes of training, after which the run ends for good; a ledger with a budget "
            "gets back the steps not made.",
            min=0,
        ),
    ] = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results in an existing --out.")
    ] = False

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The list in ``--classes``."""
        if self.classes is None:
            return None
        return tuple(name.strip() for name in self.classes.split(","))

    @property
    def weights_of_classes(self) -> dict[str, float] | None:
        """The weights in ``--class-weight``, by class."""
        return None if not self.class_weight else dict(map(class_and_weight, self.class_weight))

    @property
    def both_betas(self) -> tuple[float, float] | None:
        """The two numbers in ``--betas``."""
        if self.betas is None:
            return None
        try:
            first, second = (float(part) for part in self.betas.split(","))
        except ValueError:
            raise ValueError(
                f"--betas takes BETA1,BETA2 such as 0.9,0.999, got {self.betas!r}."
            ) from None
        return first, second

    @property
    def bounds_of_target(self) -> tuple[float, float] | None:
        """The two numbers in ``--target-bounds``."""
        return None if self.target_bounds is None else lowest_and_highest(self.target_bounds)


def class_and_weight(text: str) -> tuple[str, float]:
    """A class, which may have = in its name, and its weight."""
    name, equals, weight = text.rpartition("=")
    try:
        return name.strip(), float(weight if equals else "")
    except ValueError:
        raise ValueError(
            f"--class-weight takes CLASS=WEIGHT such as yes=5, once for each class, got {text!r}."
        ) from None


def lowest_and_highest(text: str) -> tuple[float, float]:
    """The two numbers in ``--target-bounds``, separated by a comma."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"--target-bounds takes LOWEST,HIGHEST such as 0,500000, got {text!r}."
        ) from None
    if not -1e30 < low < high < 1e30:
        raise ValueError(f"--target-bounds takes finite numbers, the lower first, got {text!r}.")
    return low, high


def with_options_of(request: type[Any]) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Give a command the fields of a dataclass as its options; it is called with an instance.

    Args:
        request: fields annotated as typer reads them, each with a default.
    """
    hints = get_type_hints(request, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(request)
    ]

    def decorate(command: Callable[[Any], None]) -> Callable[..., None]:
        def called(**given: Any) -> None:
            command(request(**given))

        called.__name__, called.__doc__ = command.__name__, command.__doc__
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate
