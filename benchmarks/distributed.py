"""Private steps in two processes: their time over plain ones, the bytes they send, the memory they
take, and a model of many ranks.

All variants take turns in the same two processes (gloo, one thread each, the same batch on each):
plain and private training of one process (each rank for itself, at the same time, so that both
have the same neighbours), plain and private DDP, plain and private FSDP2 (each block, then the
rest), and Opacus' DPDDP and FSDP2 beside them, where it is installed; what fails is named in the
column "missing". Medians are compared. Private steps are whole: delivery by a plan of sampling
rate 1, clipping, noise, agreement, charge.

Bytes and collectives of a private step are counted as dpoptim calls them, as what this rank sends.
Plain DDP's all-reduce happens in C++ and is taken to be of 4 bytes a parameter. Under FSDP2 the
gathering of parameters is counted too, which is the same plain and private.

Run: ``python benchmarks/distributed.py --out benchmarks/results`` (five minutes on two quiet
cores), which also writes the tables of docs/guides/many-processes.md; ``--tables`` writes these
alone, from saved results.
"""

import argparse
import csv
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from distributed_memory import memory_columns
from distributed_model import modelled, write_tables
from distributed_steps import CASES, MAKERS, VARIANTS, WRAPPERS, Step, counted
from ranks_of_benchmark import answered, leave
from saving import save_csv

CHOSEN = ("MLP 784-256-10", "GPT", "ViT")
TURN = 0.1  # seconds that a variant's turn takes at least, up to 20 steps
COUNTED = 3  # steps whose bytes are counted
Found = tuple[
    dict[tuple[str, str], float], dict[tuple[str, str], str], dict[str, dict[str, float]], int
]


def seconds(step: Step, repeats: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - started) / repeats


def rank_main(rank: int, size: int, store: str, title: str, rounds: int, answer: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    alone = [dist.new_group([each]) for each in range(size)][rank]
    case = CASES[title]
    steps: dict[tuple[str, str], Step] = {}
    missing: dict[tuple[str, str], str] = {}
    for who, kind in VARIANTS:
        torch.manual_seed(0)
        try:
            step = MAKERS[who](case, kind, alone if kind == "one" else dist.group.WORLD)
            step()
            step()
            steps[who, kind] = step
        except Exception as error:  # the same on both ranks
            missing[who, kind] = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:160]
    sent: dict[str, dict[str, float]] = {}
    for kind in ("DDP", "FSDP2"):
        if ("private", kind) in steps:
            with counted() as found:
                for _ in range(COUNTED):
                    steps["private", kind]()
            sent[kind] = {key: value / COUNTED for key, value in found.items()}
    often = torch.tensor([TURN / seconds(step, 1) for step in steps.values()])
    dist.all_reduce(often, dist.ReduceOp.MIN)
    repeats = dict(zip(steps, often.int().clamp(1, 20).tolist(), strict=True))
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for _ in range(rounds):
        for key, step in steps.items():
            times[key].append(seconds(step, repeats[key]))
    medians = {key: statistics.median(each) for key, each in times.items()}
    parameters = sum(p.numel() for p in case.work.build().parameters())
    leave(rank, answer, (medians, missing, sent, parameters))


def measure(title: str, rounds: int) -> Found:
    found: Found = answered(rank_main, 2, title, rounds)
    return found


def row_of(title: str, found: Found) -> dict[str, str]:
    """Milliseconds of all variants, and the ratios; "beyond one process": private over plain with
    communication, as a multiple of the same ratio in one process.
    """
    medians, missing, sent, parameters = found
    row = {"workload": title, "parameters": str(parameters)}
    for key in VARIANTS:
        taken = medians.get(key)
        row[f"{', '.join(key)} ms"] = "" if taken is None else f"{taken * 1e3:.4g}"
    for who in ("private", "Opacus"):
        for kind in WRAPPERS:
            taken, base = medians.get((who, kind)), medians.get(("plain", kind))
            row[f"{who} over plain, {kind}"] = f"{taken / base:.3g}" if taken and base else ""
    alone = row["private over plain, one"]
    for kind in ("DDP", "FSDP2"):
        share = row[f"private over plain, {kind}"]
        beyond = f"{float(share) / float(alone):.3g}" if share and alone else ""
        row[f"beyond one process, {kind}"] = beyond
        for key in ("bytes", "vectors", "small"):
            row[f"{key}, {kind}"] = f"{sent.get(kind, {}).get(key, math.nan):.6g}"
    row["missing"] = "; ".join(f"{' '.join(key)}: {why}" for key, why in missing.items())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="*", default=list(CHOSEN), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder of distributed.csv, distributed_model.csv")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("--tables", action="store_true", help="the guide's, from the CSV in --out")
    options = parser.parse_args()
    console = Console(width=150)
    rows: list[dict[str, str]] = []
    if options.tables:
        with (options.out / "distributed.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        for title in options.workload:
            row = row_of(title, measure(title, options.rounds))
            row |= {} if options.no_memory else memory_columns(title)
            rows.append(row)
            console.print(table_of(f"{title}, two processes", rows[-1:]))
    models = [line for row in rows for line in modelled(row)]
    console.print(table_of("many ranks, by the model", models))
    if options.out is not None:
        if not options.tables:
            save_csv(rows, options.out / "distributed.csv")
        save_csv(models, options.out / "distributed_model.csv")
        if not options.no_memory:
            write_tables(rows)


def table_of(title: str, rows: list[dict[str, Any]]) -> Table:
    """One row as a column of names and values, several as a table."""
    table = Table(title=title)
    if len(rows) == 1:
        table.add_column("")
        table.add_column("", justify="right")
        for name, value in rows[0].items():
            table.add_row(name, str(value))
        return table
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    return table


if __name__ == "__main__":
    main()
