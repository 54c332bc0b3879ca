"""The command line: ``dpoptim train``, ``account``, ``calibrate``, ``audit``, ``reproduce``. All that it shows is public."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from dpoptim.data import FASHION_MNIST_DIRECTORY
from dpoptim.errors import PrivacyError
from dpoptim.reproduce.experiments import EXPERIMENTS, Request
from dpoptim.version import __version__

app = typer.Typer(
    name="dpoptim",
    help="Train models with differential privacy, and know what was promised.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,  # a traceback with local variables could show records
)
schema_app = typer.Typer(help="The public description of a table.", no_args_is_help=True)
app.add_typer(schema_app, name="schema")
console = Console()
errors = Console(stderr=True)

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


class Relation(StrEnum):
    """Which data sets count as neighbours."""

    add_or_remove_one = "add-or-remove-one"
    zero_out = "zero-out"
    replace_one = "replace-one"


class ModelName(StrEnum):
    softmax = "softmax"
    mlp = "mlp"
    cnn = "cnn"


class MethodName(StrEnum):
    dp_sgd = "dp-sgd"
    dice_sgd = "dice-sgd"
    dp_ftrl = "dp-ftrl"
    momentum_gd = "momentum-gd"
    noisy_gd = "noisy-gd"
    kl_spider = "kl-spider"
    adaptive_gd = "adaptive-gd"
    proximal_point = "proximal-point"
    accelerated_srgd = "accelerated-srgd"


class TaskName(StrEnum):
    classification = "classification"
    regression = "regression"


class FeaturesName(StrEnum):
    scattering = "scattering"


class ClippingName(StrEnum):
    flat = "flat"
    automatic = "automatic"
    per_layer = "per-layer"


RecordsOption = Annotated[int, typer.Option("--n", help="Number of records; a public number.", min=1)]
BatchOption = Annotated[int, typer.Option("--batch-size", help="Expected size of a Poisson batch.", min=1)]
EpochsOption = Annotated[float | None, typer.Option(help="Passes over the data; or give --steps.")]
StepsOption = Annotated[int | None, typer.Option(help="Number of noisy steps; or give --epochs.", min=1)]
RelationOption = Annotated[Relation, typer.Option("--neighboring", help="Neighbouring relation of the guarantee.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn what bad input raises into one clear message and exit code 2."""
    from dpoptim.accounting.ledger_settings import LedgerError

    try:
        yield
    except (ValueError, TypeError, PrivacyError, LedgerError, OSError) as error:
        errors.print(f"Error: {error}", highlight=False, soft_wrap=True, markup=False, style="red")
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except KeyboardInterrupt:
        errors.print("Interrupted. If a training had begun, its whole run stays charged; no model was saved.", style="red")
        raise typer.Exit(EXIT_INTERRUPTED) from None


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        console.print(f"dpoptim {__version__}", highlight=False)
        raise typer.Exit


@app.command()
def account(
    n: RecordsOption,
    batch_size: BatchOption,
    noise_multiplier: Annotated[float, typer.Option(help="Noise std on the sum over the clip norm, > 0.")],
    epochs: EpochsOption = None,
    steps: StepsOption = None,
    delta: Annotated[
        list[float] | None,
        typer.Option(help="State epsilon at this delta; repeat for several. Default 1e-5."),
    ] = None,
    epsilon: Annotated[list[float] | None, typer.Option(help="State delta at this epsilon; repeat for several.")] = None,
    neighboring: RelationOption = Relation.add_or_remove_one,
    as_json: JsonOption = False,
) -> None:
    """What does a run of DP-SGD cost? Epsilon for any delta, delta for any epsilon.

    Example: [bold]dpoptim account --n 60000 --batch-size 500 --noise-multiplier 1.1 --steps 6000[/]
    """
    with clear_errors():
        from dpoptim.accounting.accountant import compute_delta, compute_epsilon
        from dpoptim.accounting.guarantee import rounded_up
        from dpoptim.methods import DPSGD

        deltas = delta or ([] if epsilon else [1e-5])
        first = deltas[0] if deltas else 1e-5
        plan = DPSGD(clip_norm=1.0).plan(
            n=n,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            noise_multiplier=positive("noise_multiplier", noise_multiplier),
            delta=first,
            neighboring=neighboring.value,
        )
        guarantees = [compute_epsilon(plan.event, d, plan.neighboring) for d in deltas]
        guarantees += [compute_delta(plan.event, e, plan.neighboring) for e in epsilon or []]
    if as_json:
        print(json.dumps([g.to_json() for g in guarantees], indent=2))
        return
    table = Table(title=f"{plan.steps} steps, q = {batch_size / n:.6g}, noise multiplier {noise_multiplier:g}")
    for column in ("epsilon", "delta", "neighbours", "accountant"):
        table.add_column(column, justify="right" if column in ("epsilon", "delta") else "left")
    for g in guarantees:
        table.add_row(*(f"{float(rounded_up(x, 6)):g}" for x in (g.epsilon, g.delta)), neighboring.value, g.accountant)
    console.print(table)


@app.command()
def calibrate(
    n: RecordsOption,
    batch_size: BatchOption,
    epsilon: Annotated[float, typer.Option(help="Budget: epsilon > 0; never exceeded.")],
    delta: Annotated[float, typer.Option(help="Budget: delta, 1e-14 < delta < 1, well below 1/n.")],
    epochs: EpochsOption = None,
    steps: StepsOption = None,
    neighboring: RelationOption = Relation.add_or_remove_one,
    as_json: JsonOption = False,
) -> None:
    """How much noise does a budget need? The smallest noise multiplier that keeps to it.

    Example: [bold]dpoptim calibrate --n 60000 --batch-size 4096 --epochs 40 --epsilon 2 --delta 1e-5[/]
    """
    with clear_errors():
        from dpoptim.methods import DPSGD

        plan = DPSGD(clip_norm=1.0).plan(
            n=n,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            epsilon=epsilon,
            delta=delta,
            neighboring=neighboring.value,
        )
    if as_json:
        figures = {"noise_multiplier": plan.noise_multiplier, "steps": plan.steps, **plan.guarantee.to_json()}
        print(json.dumps(figures, indent=2))
        return
    console.print(f"noise multiplier  [bold]{plan.noise_multiplier:.6g}[/]", highlight=False)
    console.print(f"steps             {plan.steps} (about {plan.epochs:.4g} epochs)", highlight=False)
    console.print(f"guarantee         {plan.guarantee}", highlight=False)


def two_numbers(option: str, text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} takes LOWEST,HIGHEST such as 0,500000, got {text!r}.") from None
    if not -1e30 < low < high < 1e30:
        raise ValueError(f"{option} takes two finite numbers, the lower first, got {text!r}.")
    return low, high


def positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value!r}: without noise there is no guarantee to compute.")
    return value


@app.command()
def train(
    data: Annotated[
        str, typer.Option(help="digits, fashion-mnist, or a .csv, .csv.gz, .parquet, .arrow or .npz file.")
    ] = "digits",
    data_dir: Annotated[Path | None, typer.Option(help="Folder of Fashion-MNIST's IDX files; default Debian's.")] = None,
    schema: Annotated[
        Path | None,
        typer.Option(help="Public description of a table's columns (TOML); dpoptim schema new drafts one."),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Label column (.csv) or array (.npz, default y).")] = None,
    task: Annotated[TaskName | None, typer.Option(help="Default: what the target's description says.")] = None,
    target_bounds: Annotated[
        str | None, typer.Option(help="LOWEST,HIGHEST of a number to predict, without a schema; public.")
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(help="Labels that may occur, comma-separated: a public list. Needed unless the data is public."),
    ] = None,
    data_is_public: Annotated[
        bool,
        typer.Option("--data-is-public", help="Allow scores and the comparison; the bundled sets are public."),
    ] = False,
    person_column: Annotated[
        str | None, typer.Option(help="Whose record each is; the guarantee then protects persons.")
    ] = None,
    records_per_person: Annotated[
        int, typer.Option(help="At most so many of a person's records take part, chosen by chance.", min=1)
    ] = 16,
    features: Annotated[FeaturesName | None, typer.Option(help="Of images: scattering, which no data has taught.")] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", help="Nominal number of records, public; needed for add-or-remove-one.", min=1),
    ] = None,
    normalise: Annotated[
        bool, typer.Option(help="Scale each record of a table to norm 1 (looks at that record alone).")
    ] = True,
    raw_pixels: Annotated[
        bool, typer.Option("--raw-pixels", help="Bundled images as they are, not sqrt(pixel) - 0.4.")
    ] = False,
    model: Annotated[ModelName, typer.Option(help="What to train.")] = ModelName.softmax,
    method: Annotated[
        MethodName,
        typer.Option(help="Training algorithm; dp-sgd, dice-sgd and dp-ftrl train any model, the others softmax."),
    ] = MethodName.dp_sgd,
    single_pass: Annotated[
        bool, typer.Option("--single-pass", help="See every record once, in order (accelerated-srgd or dp-ftrl).")
    ] = False,
    epsilon: Annotated[float | None, typer.Option(help="Budget; or give --noise-multiplier. Default 2.")] = None,
    delta: Annotated[
        float | None,
        typer.Option(help="Failure probability, well below 1/n. Default 1e-5 for the bundled sets."),
    ] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Instead of --epsilon.")] = None,
    neighboring: Annotated[
        Relation | None,
        typer.Option(help="Default: add-or-remove-one where n is public (--n, bundled sets), else zero-out."),
    ] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Bound on each record's gradient.")] = None,
    clipping: Annotated[ClippingName, typer.Option(help="How the bound is kept.")] = ClippingName.flat,
    batch_size: Annotated[int | None, typer.Option(help="Expected batch size.", min=1)] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of SGD.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Of SGD.")] = None,
    physical_batch_size: Annotated[int | None, typer.Option(help="Rows at a time that memory holds.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Initialisation and splits; never the noise.")] = 0,
    noise_seed: Annotated[
        int | None, typer.Option(help="Repeatable noise, for tests; the guarantee is then not for release.")
    ] = None,
    ledger: Annotated[Path | None, typer.Option(help="Ledger file of this data set; charged before training.")] = None,
    budget: Annotated[str | None, typer.Option(help="Total budget of a new ledger over all runs: EPSILON,DELTA.")] = None,
    compare: Annotated[
        bool | None,
        typer.Option("--compare/--no-compare", help="Also train without privacy (public data only)."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/DATA-MODEL-TIME.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results in an existing --out.")] = False,
) -> None:
    """Train a classifier privately, and write model, plan, certificate and report into a run directory.

    Example: [bold]dpoptim train --data fashion-mnist --model softmax --epsilon 2 --delta 1e-5[/]

    With a table of your own: [bold]dpoptim train --data patients.csv --target outcome --classes no,yes
    --epsilon 1 --delta 1e-6 --ledger patients.sqlite --budget 3,1e-6[/]
    """
    with clear_errors():
        from dpoptim.runs.command import TrainRequest, run_training

        request = TrainRequest(
            data=data,
            data_dir=data_dir,
            schema=schema,
            target=target,
            task=None if task is None else task.value,
            target_bounds=None if target_bounds is None else two_numbers("--target-bounds", target_bounds),
            person_column=person_column,
            records_per_person=records_per_person,
            features=None if features is None else features.value,
            classes=None if classes is None else tuple(name.strip() for name in classes.split(",")),
            data_is_public=data_is_public,
            n=n,
            normalise=normalise,
            raw_pixels=raw_pixels,
            model=model.value,
            method=method.value,
            single_pass=single_pass,
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=noise_multiplier,
            neighboring=None if neighboring is None else neighboring.value,
            clip_norm=clip_norm,
            clipping=clipping.value,
            batch_size=batch_size,
            epochs=epochs,
            learning_rate=learning_rate,
            momentum=momentum,
            physical_batch_size=physical_batch_size,
            seed=seed,
            noise_seed=noise_seed,
            ledger=ledger,
            budget=budget,
            compare=compare,
            out=out,
            overwrite=overwrite,
        )
        run_training(request, console)


@schema_app.command("new")
def schema_new(
    data: Annotated[Path, typer.Argument(help="A .csv, .csv.gz, .parquet or .arrow file.")],
    target: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    person_column: Annotated[str | None, typer.Option(help="The column that says whose record each is.")] = None,
    data_is_public: Annotated[
        bool, typer.Option("--data-is-public", help="Fill in bounds, categories and classes from the values.")
    ] = False,
    task: Annotated[TaskName, typer.Option(help="What to predict of public data: a class, or a number.")] = (
        TaskName.classification
    ),
    out: Annotated[Path | None, typer.Option(help="Where to write; default DATA.schema.toml beside it.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Draft a schema of a table from the names and types of its columns; no value is read. You fill in the rest.

    Example: [bold]dpoptim schema new patients.csv --target outcome[/]
    """
    with clear_errors():
        from dpoptim.runs.schema_command import new_schema

        file, open_ends = new_schema(
            data,
            target=target,
            person=person_column,
            public=data_is_public,
            regression=task is TaskName.regression,
            out=out,
            overwrite=overwrite,
        )
    console.print(f"wrote {file}", highlight=False, markup=False, soft_wrap=True)
    if open_ends:
        console.print(f"Fill in what is marked FILL-IN ({open_ends} columns).", highlight=False)


@schema_app.command("check")
def schema_check(
    schema: Annotated[Path, typer.Argument(help="A schema in TOML.")],
) -> None:
    """Say whether a schema is complete, and what features it makes."""
    with clear_errors():
        from dpoptim.data import read_schema

        found = read_schema(schema)
    target = "none" if found.target is None else found.target.name
    text = f"{len(found.features)} columns make {found.width} features; target {target}; person {found.person or 'none'}"
    console.print(text, highlight=False, markup=False)


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="Run directory of dpoptim train, or its model.pt.")],
    data: Annotated[Path, typer.Argument(help="New records: a table with the same columns, or a .npz file.")],
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("predictions.csv"),
    data_is_public: Annotated[
        bool, typer.Option("--data-is-public", help="The true values are there and public: print the score.")
    ] = False,
) -> None:
    """Predict new records with a trained model: columns are found by name, and encoded as in training.

    Example: [bold]dpoptim predict runs/patients new.csv --out predictions.csv[/]
    """
    with clear_errors():
        from dpoptim.runs.predict import predict_file

        predicted = predict_file(run, data, out, public=data_is_public)
    console.print(f"wrote {predicted.records} predictions to {out}", highlight=False, markup=False, soft_wrap=True)
    if predicted.score is not None:
        console.print(f"score {predicted.score:.4f} (accuracy, or R2 of numbers)", highlight=False)


@app.command()
def audit(
    method: Annotated[str, typer.Argument(help="A method, such as dp-sgd or kl-spider, or all.")] = "all",
    run: Annotated[
        Path | None, typer.Option("--run", help="Audit a saved run instead: its certificate and its plan.")
    ] = None,
    trials: Annotated[int, typer.Option(min=100, help="Of each attack; more show more of a claim.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of coins and noise, so that a finding repeats.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the table (JSON) and the picture.")] = Path("runs/audit"),
) -> None:
    """Attack what the library promises through its own code, and compare what the attack certifies with the claim.

    An audit can refute a claim, never prove one. Ends with an error if a verdict is not as it should be.

    Example: [bold]dpoptim audit dp-ftrl[/]
    """
    with clear_errors():
        from dpoptim.audit.command import audit_run, chosen, save, verdict_text
        from dpoptim.audit.methods import CONFIDENCE, run_audits

        out.mkdir(parents=True, exist_ok=True)
        if run is not None:
            findings = audit_run(run, trials=trials, seed=seed)
        else:
            names = chosen(method)
            with Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")) as bar:
                task = bar.add_task("audits", total=len(names))
                findings = run_audits(names, trials=trials, seed=seed, on_done=lambda _: bar.advance(task))
        save(findings, out, {"trials": trials, "seed": seed})
        table = Table(title=f"Audits, each with confidence {CONFIDENCE:.7g}")
        for heading in ("method", "claimed epsilon", "audited, at least", "limit of the trials", "trials", "verdict"):
            table.add_column(heading)
        for one in findings:
            numbers = (f"{value:.3f}" for value in (one.claimed, one.lower_bound, one.limit))
            verdict = verdict_text(one, trials) if one.as_expected else f"[red]{one.verdict}[/] (should be {one.expected})"
            table.add_row(one.method, *numbers, str(one.trials or "exact"), verdict)
        console.print(table)
        console.print(f"saved in {out}/: audit.json, audit.png", highlight=False)
        if not all(one.as_expected for one in findings):
            raise typer.Exit(1)


@app.command()
def reproduce(
    experiment: Annotated[str, typer.Argument(help=f"Which one: {', '.join(EXPERIMENTS)}.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for tables (CSV) and pictures.")] = Path("runs/reproduce"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer settings and seeds: minutes instead of tens.")] = False,
    data: Annotated[Path, typer.Option("--data", help="Folder of Fashion-MNIST.")] = Path(FASHION_MNIST_DIRECTORY),
    tweets: Annotated[Path | None, typer.Option(help="Folder of a TweetEval task, such as emotion.")] = None,
    e2e: Annotated[Path | None, typer.Option(help="Folder of the E2E challenge's data.")] = None,
) -> None:
    """Run an experiment of the papers on public or made-up data, and save its tables and pictures.

    Example: [bold]dpoptim reproduce kl-rates --quick[/]
    """
    with clear_errors():
        if experiment not in EXPERIMENTS:
            raise ValueError(f"experiment must be one of {', '.join(EXPERIMENTS)}; got {experiment!r}.")
        out.mkdir(parents=True, exist_ok=True)
        EXPERIMENTS[experiment](Request(out, quick, data, tweets, e2e, say=console.print))
    console.print(f"saved in {out}/", highlight=False)


if __name__ == "__main__":
    sys.exit(app())
