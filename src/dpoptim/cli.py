"""The command line: ``dpoptim train``, ``account``, ``audit``, ...; it shows public things only."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from dpoptim.commands.account import account, calibrate
from dpoptim.commands.compare import compare
from dpoptim.commands.evaluate import evaluate
from dpoptim.commands.ledger import ledger as ledger_command
from dpoptim.commands.plan import plan as plan_command
from dpoptim.commands.predict import predict
from dpoptim.commands.schema import schema_commands
from dpoptim.commands.tune import tune
from dpoptim.commands.verify import certify, sign, verify
from dpoptim.reproduce.experiments import EXPERIMENTS
from dpoptim.reproduce.request import FOLDERS, Request, fashion_folder, shown
from dpoptim.runs.options import TrainRequest, with_options_of
from dpoptim.terminal import EXIT_INTERRUPTED, cell, clear_errors, console, say, show_waits
from dpoptim.version import __version__

app = typer.Typer(
    name="dpoptim",
    help="Train models with differential privacy, and know what was promised.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,  # a traceback with local variables could show records
)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        console.print(f"dpoptim {__version__}", highlight=False)
        raise typer.Exit
    show_waits()


app.command()(account)
app.command()(calibrate)


@app.command()
@with_options_of(TrainRequest)
def train(request: TrainRequest) -> None:
    """Train a classifier or a regressor privately, and write model, certificate and report.

    All goes into one run directory, the plan included.

    Example: [bold]dpoptim train --data fashion-mnist --model softmax --epsilon 2 --delta 1e-5[/]

    With a table of your own: [bold]dpoptim train --data patients.csv --target outcome --classes
    no,yes --epsilon 1 --delta 1e-6 --ledger patients.sqlite --budget 3,1e-6[/]
    """
    with clear_errors():
        from dpoptim.runs.command import run_training
        from dpoptim.runs.interrupted import RunInterruptedError

        try:
            run_training(request, console)
        except RunInterruptedError as stopped:
            say(stopped, style="yellow")
            raise typer.Exit(EXIT_INTERRUPTED) from None


@app.command()
def methods(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page of the documents instead.")
    ] = False,
) -> None:
    """List the training methods, those of other packages included.

    Example: [bold]dpoptim methods[/]
    """
    with clear_errors():
        from dpoptim.runs.method_table import markdown_table, method_rows

        if markdown:
            print(markdown_table())
            return
        table = Table.grid(padding=(0, 2, 1, 0))
        table.add_column(no_wrap=True)
        table.add_column()
        for row in method_rows():
            (_, name), (_, summary), *others = row.items()
            lines = [summary, *(f"{heading}: {text}" for heading, text in others)]
            table.add_row(name, "\n".join(lines))
        console.print(table)


@app.command()
def audit(
    method: Annotated[
        str, typer.Argument(help="A method, such as dp-sgd or kl-spider, or all.")
    ] = "all",
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Audit a saved run instead: its certificate and its plan."),
    ] = None,
    trials: Annotated[
        int, typer.Option(min=100, help="Of each attack; more show more of a claim.")
    ] = 100_000,
    seed: Annotated[int, typer.Option(help="Of coins and noise, so that a finding repeats.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the table (JSON) and the picture.")] = Path(
        "runs/audit"
    ),
) -> None:
    """Attack the library's promises through its own code.

    What an attack certifies is compared with the claim.

    An audit can refute a claim, never prove one. Ends with an error if a verdict is not as it
    should be.

    Example: [bold]dpoptim audit dp-ftrl[/]
    """
    with clear_errors():
        from rich.progress import BarColumn, Progress, TextColumn

        from dpoptim.audit.attack_families import run_audits
        from dpoptim.audit.command import audit_run, chosen, save, verdict_text
        from dpoptim.audit.finding import CONFIDENCE

        out.mkdir(parents=True, exist_ok=True)
        if run is not None:
            findings = audit_run(run, trials=trials, seed=seed)
        else:
            names = chosen(method)
            with Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}"),
            ) as bar:
                task = bar.add_task("audits", total=len(names))
                findings = run_audits(
                    names, trials=trials, seed=seed, on_done=lambda _: bar.advance(task)
                )
        save(findings, out, {"trials": trials, "seed": seed})
        table = Table(title=f"Audits, each with confidence {CONFIDENCE:.7g}")
        for heading in (
            "method",
            "claimed epsilon",
            "audited, at least",
            "expected of the trials",
            "trials",
            "verdict",
        ):
            table.add_column(heading)
        for one in findings:
            numbers = (f"{value:.3f}" for value in (one.claimed, one.lower_bound, one.limit))
            verdict = cell(verdict_text(one, trials))
            told = verdict if one.as_expected else f"[red]{verdict}[/]"
            table.add_row(cell(one.method), *numbers, str(one.trials or "exact"), told)
        console.print(table)
        say(f"saved in {out}/: audit.json, audit.png")
        if not all(one.as_expected for one in findings):
            raise typer.Exit(1)


@app.command()
def reproduce(
    experiment: Annotated[
        str, typer.Argument(help=f"Which one: {', '.join(EXPERIMENTS)}.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for tables (CSV) and pictures.")] = Path(
        "runs/reproduce"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer settings and seeds: minutes instead of tens.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option("--data-dir", "--data", help="Of Fashion-MNIST; default Debian's."),
    ] = None,
    tweets: Annotated[
        Path | None,
        typer.Option(help="Folder of a TweetEval task, such as emotion, or of several."),
    ] = None,
    e2e: Annotated[Path | None, typer.Option(help=f"To read: {FOLDERS['e2e']}.")] = None,
    features: Annotated[Path | None, typer.Option(help=f"To read: {FOLDERS['features']}.")] = None,
    emnist: Annotated[Path | None, typer.Option(help=f"To read: {FOLDERS['emnist']}.")] = None,
    cifar: Annotated[Path | None, typer.Option(help=f"To read: {FOLDERS['cifar']}.")] = None,
    model: Annotated[Path | None, typer.Option(help=f"To read: {FOLDERS['model']}.")] = None,
    device: Annotated[str, typer.Option(help="Of the model that is read: cpu or cuda.")] = "cpu",
) -> None:
    """Run an experiment of the papers on public or made-up data, and save its tables and pictures.

    Example: [bold]dpoptim reproduce kl-rates --quick[/]

    What you give is taken to be public: settings are chosen on it, scores are
    shown, and nothing is charged. Data and models that no package has stand in
    for ours where you bring them: [bold]--features[/] for das-table4, das-table5,
    das-table7, das-baselines; [bold]--emnist[/] for das-table6, das-table7,
    das-baselines; [bold]--cifar[/] with [bold]--model[/] for dice-vit;
    [bold]--e2e[/] with [bold]--model[/] for dice-table3.

    Features, here CIFAR-100's, are made with numpy, torchvision's models and
    datasets, and torch's Identity, DataLoader and cat (Das et al. take resnet34
    for Caltech-256 and Food-101):

    \b
    known = models.ResNet18_Weights.IMAGENET1K_V1
    net = models.resnet18(weights=known).eval().requires_grad_(False)
    net.fc = Identity()
    def part(train):
        images = datasets.CIFAR100("cifar", train, known.transforms())
        return map(cat, zip(*((net(x), y) for x, y in DataLoader(images, 256))))
    (x, y), (u, v) = part(True), part(False)
    numpy.savez("cifar-100.npz", x_train=x, y_train=y, x_test=u, y_test=v)
    """
    with clear_errors():
        if experiment not in EXPERIMENTS:
            raise ValueError(
                f"experiment must be one of {', '.join(EXPERIMENTS)}; got {experiment!r}."
            )
        request = Request(
            out,
            quick,
            data or fashion_folder(),
            tweets,
            e2e,
            features,
            emnist,
            cifar,
            model,
            device,
            say,
        )
        with shown(experiment, out, console):
            EXPERIMENTS[experiment](request)


app.add_typer(schema_commands, name="schema")
app.command("plan")(plan_command)
app.command()(tune)
app.command()(predict)
app.command()(evaluate)
app.command()(compare)
app.command()(verify)
app.command()(sign)
app.command(
    hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)(certify)
app.command()(ledger_command)
