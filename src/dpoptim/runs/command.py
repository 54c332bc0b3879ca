"""``dpoptim train``: from the options to the run directory."""

import copy
import datetime
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dpoptim.accounting.budget_words import WholeBudgetWarning
from dpoptim.accounting.guarantee import rounded_up
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.ledger_settings import dataset_of_unit
from dpoptim.data import Data
from dpoptim.files import make_folder
from dpoptim.installed import SOURCES, digests
from dpoptim.methods import TrainingMethod, WholeRun
from dpoptim.optimizers import optimizer
from dpoptim.plan import Plan
from dpoptim.planning import warnings_about_plan
from dpoptim.privacy_unit import Unit
from dpoptim.recipes import for_numbers, rate_of
from dpoptim.runs.choose_method import with_method
from dpoptim.runs.inputs import BUNDLED, load_data, warnings_for_owner
from dpoptim.runs.interrupted import SECRET, SavedRun, stop_on_signals
from dpoptim.runs.models import build_model
from dpoptim.runs.options import TrainRequest
from dpoptim.runs.outcome import (
    entry_of,
    parameters_of,
    print_summary,
    result_of,
    try_writing,
    write_run,
)
from dpoptim.runs.plans import (
    defaults_of,
    delta_of,
    epsilon_of,
    plan_of,
    relation_kept,
    why_this_relation,
)
from dpoptim.runs.processes import launched, refused_together
from dpoptim.runs.result import kind_of_model
from dpoptim.runs.saved_model import save_model
from dpoptim.runs.train import Optimization, train_privately
from dpoptim.runs.train_solver import row_norm, solver_clip, train_by_solver
from dpoptim.runs.train_without_privacy import comparison_epochs, train_without_privacy
from dpoptim.runs.unfinished import plan_on_disk
from dpoptim.runs.whole_budget import whole_budget
from dpoptim.terminal import say
from dpoptim.training.progress import StepsPerSecond


def run_training(request: TrainRequest, console: Console) -> Path:
    """Load, plan, train, save, report. Returns the run directory.

    Everything that can be refused is refused before the first noisy step: data, plan, ledger, run
    directory. In the processes that torchrun starts, rank 0 alone opens the ledger and the run
    directory, and reports.

    **Guarantee.** What is written and printed is covered by the plan's guarantee, or was declared
    public.
    """
    with launched() as ranks, ExitStack() as stack:
        first = ranks.rank == 0
        # now: by the end, the files may be another version's
        ranks.agree({"installation of dpoptim": digests()[SOURCES]})
        console = console if first else Console(quiet=True)
        with refused_together(ranks, "dpoptim train"):
            data = load_data(request)
            kept = ranks.from_first(partial(relation_kept, request.ledger))
            torch.manual_seed(request.seed)
            model = build_model(request.model, data.x.shape[1:], data.outputs)
            plan, optimization = planned_run(request, data, kept, parameters_of(model))
            most_seconds = seconds_of(request, plan)
            compare = wants_comparison(request, data)
            comparison = copy.deepcopy(model)
            folder = Path()
            ledger = Ledger(neighboring=plan.neighboring)  # of which rank 0's is charged
            if first:
                ledger = stack.enter_context(open_ledger(request, plan.neighboring, data))
                # a run that goes on has its charge
                if plan.noise_multiplier > 0 and not request.resume:
                    ledger.check(plan.event, plan.neighboring)
                folder = prepare_folder(request, data)
                try_writing(folder)  # before anything is spent
                doubts = [*warnings_about_plan(plan, parameters_of(model)), *no_room(ledger, plan)]
                # the plan itself is printed with the notes of its guarantee
                doubts = [each for each in doubts if each not in plan.guarantee.notes]
                why = why_this_relation(request, request.data in BUNDLED, plan.neighboring, kept)
                noted = notes_on(request, data, ledger, doubts)
                introduce(plan, optimization, noted, relation=why, console=console)
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore", WholeBudgetWarning)  # it is among the notes
                stack.enter_context(plan_on_disk(folder, plan, ledger))
        folder = ranks.from_first(lambda: folder)
        stop = stack.enter_context(stop_on_signals())  # results are written in any case
        with progress_bar(console, plan) as count:
            saved = SavedRun(folder, seconds=60 * request.save_every, stop=stop, ranks=ranks)
            by_loop = partial(
                train_privately, saved=saved, resume=request.resume, most_seconds=most_seconds
            )
            train = train_by_solver if isinstance(plan.method, WholeRun) else by_loop
            kind = kind_of_model(request.model, classifies=data.target_bounds is None)
            trained = train(
                data,
                model,
                plan,
                optimization,
                ledger=ledger,
                label=f"training of {kind} on {data.name[:150]}",
                noise_seed=request.noise_seed,
                on_step=count,
            )
        if not first:
            return folder
        clipped_to = row_norm(data) if isinstance(plan.method, WholeRun) else None
        # First of all: the budget that made it is spent.
        digest = save_model(folder / "model.pt", model, request.model, data, clipped_to)
        entry = entry_of(request, ledger, trained)
        scores = None
        if compare and not stop.asked:
            epochs = comparison_epochs(data)
            scores = train_without_privacy(data, comparison, epochs=epochs, seed=request.seed)
        result = result_of(
            request, data, plan, optimization, trained, parameters_of(model), entry, scores, digest
        )
        write_run(folder, result, data)
        saved.remove()
        print_summary(console, result, plan, folder)
    return folder


def introduce(
    plan: Plan,
    optimization: Optimization,
    notes: Iterable[str],
    *,
    relation: str,
    console: Console,
) -> None:
    """Print what was decided, and what a person should know before anything is spent."""
    say(plan.describe(), to=console)
    say(f"  neighbours   {relation}", to=console)
    if not isinstance(plan.method, WholeRun):
        rate = f"learning rate {optimization.rate_in_words(plan)}"
        say(f"  optimizer    {optimization.optimizer}, {rate}", to=console)
    for note in notes:
        say(note, style="yellow", to=console)


def seconds_of(request: TrainRequest, plan: Plan) -> float:
    """Time that ``--max-time`` leaves for training."""
    if request.max_time is None:
        return math.inf
    if isinstance(plan.method, WholeRun):
        raise ValueError(
            f"--max-time ends runs between two steps, and --method {plan.method.solver} releases "
            "within one plan of its own. Fix: leave it out."
        )
    return 60 * request.max_time


def wants_comparison(request: TrainRequest, data: Data) -> bool:
    """Whether to train without privacy, too."""
    compare = data.public if request.compare is None else request.compare
    if compare and not data.public:
        raise ValueError(
            "--compare trains without privacy, which only public data allows: add --data-is-public."
        )
    return compare


def no_room(ledger: Ledger, plan: Plan) -> Iterator[str]:
    """The warning that nothing is left after this first run, with batches that leave something."""
    said = ledger.takes_all(plan.event) if plan.noise_multiplier > 0 else ""
    if not said:
        return
    room = larger_batch(ledger, plan)
    yield said if room is None else f"{said}. Here: --batch-size {room}"


def larger_batch(ledger: Ledger, plan: Plan) -> int | None:
    """The first batch twice, four times ... as large that leaves later runs something, if any."""
    batch_size = 2 * plan.batch_size
    while isinstance(plan.method, TrainingMethod) and batch_size <= plan.n:
        larger = plan.method.plan(
            n=plan.n,
            batch_size=batch_size,
            epochs=plan.epochs,
            epsilon=plan.guarantee.epsilon,
            delta=plan.delta,
            neighboring=plan.neighboring,
        )
        if not ledger.takes_all(larger.event):
            return batch_size
        batch_size *= 2
    return None


def notes_on(
    request: TrainRequest, data: Data, ledger: Ledger, doubts: Sequence[str]
) -> Iterator[str]:
    """Warnings before anything is spent."""
    yield from (f"Note: {doubt}" for doubt in doubts)
    yield from warnings_for_owner(data, request)
    if request.ledger is not None and ledger.budget is None:
        yield (
            "Note: this ledger has no budget, so it writes every run down and refuses none; "
            "a new one takes --budget."
        )


def planned_run(
    request: TrainRequest, data: Data, kept: str | None, parameters: int
) -> tuple[Plan, Optimization]:
    """The plan, of persons where records belong to persons, and the optimizer's settings.

    Args:
        kept: the relation of the ledger; see `relation_kept`.
        parameters: numbers that are trained.
    """
    bundled, n = request.data in BUNDLED, request.n or data.units
    epsilon, delta = epsilon_of(request), delta_of(request, n, bundled)
    request = with_method(request, data, kept, epsilon=epsilon, delta=delta)
    by = optimizer(request.optimizer, momentum=request.momentum, betas=request.both_betas)
    clip = solver_clip(data)
    defaults = defaults_of(request, data, bundled=bundled)
    if data.target_bounds is not None:
        defaults = for_numbers(defaults, parameters)
    refuse_views(request, data)
    plan = plan_of(
        request, data.units, bundled=bundled, largest_gradient=clip, defaults=defaults, kept=kept
    )
    if data.persons is not None:
        plan = replace(plan, unit=Unit("person", request.records_per_person))
    rate, chosen_for = request.learning_rate, None
    if rate is None:  # solvers have none of their own
        whole = isinstance(plan.method, WholeRun)
        rate = defaults.learning_rate if whole else rate_of(defaults, plan, by, parameters)
        chosen_for = None if by.kind.adaptive else defaults.clip_norm
    return plan, Optimization(
        optimizer=by,
        learning_rate=rate,
        averaged=defaults.averaged if request.iterate == "average" else 0.0,
        physical_batch_size=request.physical_batch_size or defaults.physical_batch_size,
        iterate=request.iterate,
        projection=request.projection,
        views=request.views,
        chosen_for=chosen_for,
    )


def refuse_views(request: TrainRequest, data: Data) -> None:
    """Refuse views of what cannot be moved, or whose rows are a person's."""
    if request.views > 1 and (data.x.ndim != 4 or request.features is not None):
        raise ValueError(
            "--views are of pixels, moved across the image: tables and features have none. Fix: "
            "leave out --views, or --features."
        )
    if request.views > 1 and data.persons is not None:
        raise ValueError(
            "--views: the rows of a step belong to persons here. Fix: leave out --views, or "
            "--person-column."
        )


def open_ledger(request: TrainRequest, neighboring: str, data: Data) -> Ledger:
    """The ledger of the data set, for its unit: the file named, or one in memory."""
    unit = "record" if data.persons is None else "person"
    epsilon, delta = whole_budget(request.budget, request.ledger)
    if request.dataset is not None and request.ledger is None:
        raise ValueError("--dataset names a ledger's records; name their ledger with --ledger.")
    # a file belongs to one data set
    dataset = None if request.ledger is None else charged_to(request, data)
    whole = Ledger(
        request.ledger, dataset=dataset, epsilon=epsilon, delta=delta, neighboring=neighboring
    )
    return whole.of_units(unit)


def charged_to(request: TrainRequest, data: Data) -> str:
    """The data set's name in its ledger: of persons and of records, which do not add up."""
    return dataset_of_unit(
        request.dataset or data.name, "record" if data.persons is None else "person"
    )


def prepare_folder(request: TrainRequest, data: Data) -> Path:
    """Make the run directory; never touch results that are there unless told to."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = request.out or Path("runs") / f"{data.name}-{request.model}-{stamp}"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; name a folder.")
    if request.resume:
        if not (folder / SECRET).is_file():
            raise ValueError(
                "--resume: --out names no run that was interrupted. Fix: give the run directory, "
                "or start anew."
            )
        return folder
    if folder.is_dir() and any(folder.iterdir()) and not request.overwrite:
        raise ValueError(f"--out {folder} is not empty; name another folder, or allow --overwrite.")
    make_folder(folder)
    return folder


@contextmanager
def progress_bar(console: Console, plan: Plan) -> Iterator[Callable[[int], None]]:
    """A bar of public figures: steps, of which it is told, and the epsilon that is reserved."""
    promise = (
        f"epsilon {rounded_up(plan.guarantee.epsilon)} reserved"
        if plan.noise_multiplier > 0
        else "no privacy"
    )
    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps"),
    )
    with Progress(
        *columns, TextColumn(promise), TimeRemainingColumn(), StepsPerSecond(), console=console
    ) as progress:
        task = progress.add_task("training", total=plan.steps)
        yield lambda step: progress.update(task, completed=step)
