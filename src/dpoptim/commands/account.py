"""``dpoptim account`` and ``dpoptim calibrate``: what noise costs, and how much a budget needs."""

import json
from typing import Annotated

import typer
from rich.table import Table

from dpoptim.runs.options import JsonOption, Relation, SettingOption
from dpoptim.terminal import clear_errors, console, say

RecordsOption = Annotated[
    int, typer.Option("--n", help="Number of records; a public number.", min=1)
]
BatchOption = Annotated[
    int | None, typer.Option("--batch-size", help="Expected size of a batch.", min=1)
]
MethodOption = Annotated[str, typer.Option("--method", help="As `dpoptim methods` names it.")]
EpochsOption = Annotated[float | None, typer.Option(help="Passes over the data; or give --steps.")]
StepsOption = Annotated[
    int | None, typer.Option(help="Number of noisy steps; or give --epochs.", min=1)
]
RelationOption = Annotated[
    Relation | None,
    typer.Option("--neighboring", help="Neighbouring relation; default: the method's own."),
]


def account(
    n: RecordsOption,
    noise_multiplier: Annotated[
        float, typer.Option(help="Noise std on the sum over the clip norm, > 0.")
    ],
    batch_size: BatchOption = None,
    method: MethodOption = "dp-sgd",
    setting: SettingOption = None,
    epochs: EpochsOption = None,
    steps: StepsOption = None,
    delta: Annotated[
        list[float] | None,
        typer.Option(help="State epsilon at this delta; repeat for several. Default 1e-5."),
    ] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="State delta at this epsilon; repeat for several.")
    ] = None,
    neighboring: RelationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute what a run costs: epsilon for any delta, delta for any epsilon.

    Example: [bold]dpoptim account --n 60000 --batch-size 500 --noise-multiplier 1.1 --steps
    6000[/]
    """
    with clear_errors():
        from dpoptim.accounting.accountant import compute_delta, compute_epsilon
        from dpoptim.accounting.guarantee import rounded_up
        from dpoptim.runs.plans import plan_by_numbers

        deltas = delta or ([] if epsilon else [1e-5])
        first = deltas[0] if deltas else 1e-5
        plan = plan_by_numbers(
            method,
            n=n,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            noise_multiplier=positive_noise("noise_multiplier", noise_multiplier),
            delta=first,
            neighboring=neighboring,
            setting=setting,
        )
        guarantees = [compute_epsilon(plan.event, d, plan.neighboring) for d in deltas]
        guarantees += [compute_delta(plan.event, e, plan.neighboring) for e in epsilon or []]
    if as_json:
        print(json.dumps([g.to_json() for g in guarantees], indent=2))
        return
    table = Table(
        title=f"{plan.steps} steps, q = {plan.batch_size / n:.6g}, "
        f"noise multiplier {noise_multiplier:g}"
    )
    for column in ("epsilon", "delta", "neighbours", "accountant"):
        table.add_column(column, justify="right" if column in ("epsilon", "delta") else "left")
    for g in guarantees:
        table.add_row(
            *(f"{float(rounded_up(x, 6)):g}" for x in (g.epsilon, g.delta)),
            plan.neighboring,
            g.accountant,
        )
    console.print(table)


def calibrate(
    n: RecordsOption,
    epsilon: Annotated[float, typer.Option(help="Budget: epsilon > 0; never exceeded.")],
    delta: Annotated[float, typer.Option(help="Budget: delta, above 1e-14, at most 1/(10 n).")],
    batch_size: BatchOption = None,
    method: MethodOption = "dp-sgd",
    setting: SettingOption = None,
    epochs: EpochsOption = None,
    steps: StepsOption = None,
    neighboring: RelationOption = None,
    as_json: JsonOption = False,
) -> None:
    """How much noise does a budget need? The smallest noise multiplier that keeps to it.

    Example: [bold]dpoptim calibrate --n 60000 --batch-size 4096 --epochs 40 --epsilon 2 --delta
    1e-6[/]

    With correlated noise on sampled batches: [bold]dpoptim calibrate --n 60000 --batch-size 500
    --epochs 10 --epsilon 2 --delta 1e-6 --method dp-ftrl --set sampling=cyclic-poisson[/]
    """
    with clear_errors():
        from dpoptim.runs.plans import plan_by_numbers

        plan = plan_by_numbers(
            method,
            n=n,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            epsilon=epsilon,
            delta=delta,
            neighboring=neighboring,
            setting=setting,
        )
    if as_json:
        figures = {
            "noise_multiplier": plan.noise_multiplier,
            "steps": plan.steps,
            **plan.guarantee.to_json(),
        }
        print(json.dumps(figures, indent=2))
        return
    console.print(f"noise multiplier  [bold]{plan.noise_multiplier:.6g}[/]", highlight=False)
    console.print(
        f"steps             {plan.steps} (about {plan.epochs:.4g} epochs)", highlight=False
    )
    say(f"guarantee         {plan.guarantee}")


def positive_noise(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(
            f"{name} must be above 0, got {value!r}: without noise there is no guarantee to "
            "compute."
        )
    return value
