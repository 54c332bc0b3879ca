"""Time and memory of one private step as multiples of the plain PyTorch step on the same model and
batch: with one thread and with two, alone and in a whole loop.

Columns take turns in one process, and medians of each turn's ratios are shown, because machines
are noisy. "ours" has everything but the noise (gradients, clipping, summing, optimizer), "ours,
noise" also draws it, in float64 with a full tail; the peers draw theirs in float32. "ours, MKL"
multiplies matrices as plain PyTorch does, where ours would take a faster library on this processor
(see `multiplication`), and in compiled functions takes no wider vectors in
such products than that library does. "ours, loop" is what users run: coins, loading, checks,
noise and all, against a plain loop over a DataLoader; its batches vary, and its times are divided
by their share of the expected one. "ours, compiled" is held against compiled plain PyTorch. "closed
form" is the path of generalised linear models. Opacus trains the models as it asks for them: with
its own LSTM, and with a table and a mean in the place of a bag. Peers run with one thread.

Memory is the peak above the model and its batch, of processes of their own.

Each row has so many seconds for its turns (three turns at least, two of peers), after columns were
made and warmed up. The whole table takes ten to fifteen minutes on two idle cores; `--rows` and
`--columns` choose, `--docs` writes the tables into a page, `--keep-freed` has the process keep the
memory that steps free, plain ones too.

Run: ``python benchmarks/step_time.py [--rows GPT ...] [--columns ours ...] [--threads 1 2]
[--out benchmarks/results] [--docs docs/speed.md]``. Opacus takes part where it is installed (extra
``bench``).
"""

import argparse
import gc
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

import dpoptim
from dpoptim.gradients.arithmetic import onednn
from saving import save_csv, write_between
from steps import (
    PrivateLoop,
    Step,
    by_mkl,
    closed_form,
    made,
    opacus,
    ours,
    plain,
    plain_loop,
    vmapped,
)
from workloads import WORKLOADS, Workload

LEAST_TURNS, MOST_TURNS, PEER_TURNS = 3, 25, 2
SHORTEST = 0.05  # seconds that are timed at once
PLAIN, LOOP, COMPILED = "plain", "plain, loop", "plain, compiled"
# rows that a compiler is tried on unless it is asked for: it takes longer than all their turns
TO_COMPILE = ("MLP 784-256-10", "GPT", "GELU written out")
SMALLEST = "softmax 785-10"
ROWS = [name for name in WORKLOADS if name != "small GPT"]  # of the table; it is asked for by name
IN_MEMORY = (PLAIN, "ours, noise", "Opacus hooks", "Opacus ghost")


@dataclass(frozen=True)
class Column:
    """A way to take a step.

    Attributes:
        beside: the column that its time is a multiple of.
        scales: whether it is measured with every number of threads, or with one alone.
        turns: that it takes at most.
    """

    make: Callable[[Workload], Step]
    beside: str = PLAIN
    scales: bool = True
    turns: int = MOST_TURNS


COLUMNS = {
    PLAIN: Column(plain),
    "ours": Column(ours),
    "ours, MKL": Column(lambda work: by_mkl(ours(work))),
    "ours, noise": Column(lambda work: ours(work, noise=True)),
    LOOP: Column(plain_loop),
    "ours, loop": Column(PrivateLoop, LOOP),
    "ours, closed form": Column(closed_form, scales=False),
    COMPILED: Column(lambda work: plain(work, compiled=True), scales=False),
    "ours, compiled": Column(lambda work: ours(work, compiled=True), COMPILED, scales=False),
    "vmap(grad)": Column(vmapped, scales=False, turns=PEER_TURNS),
    "Opacus hooks": Column(lambda work: opacus(work, ghost=False), scales=False, turns=PEER_TURNS),
    "Opacus ghost": Column(lambda work: opacus(work, ghost=True), scales=False, turns=PEER_TURNS),
}
Key = tuple[str, int]  # a column, and how many threads


@dataclass
class Row:
    """What was measured of one workload: seconds of each turn, MiB, and why the rest is missing."""

    records: int
    seconds: dict[Key, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)

    def ratio(self, key: Key) -> float | None:
        """The median of the turns' ratios."""
        beside = (COLUMNS[key[0]].beside, key[1])
        if key not in self.seconds or beside not in self.seconds:
            return None
        pairs = zip(self.seconds[key], self.seconds[beside], strict=False)  # peers stop early
        return statistics.median(ours / theirs for ours, theirs in pairs)


def seconds(step: Step, repeats: int) -> float:
    """Of a step; of the expected batch where batches vary."""
    shares = 0.0
    started = time.perf_counter()
    for _ in range(repeats):
        step()
        shares += step.share if isinstance(step, PrivateLoop) else 1.0
    return (time.perf_counter() - started) / shares


def measure(work: Workload, names: Sequence[str], threads: Sequence[int], most: float) -> Row:
    """All columns of a row, in turns, for ``most`` seconds or `LEAST_TURNS`."""
    row, steps, repeats = Row(len(work.data()[0])), dict[str, Step](), dict[str, int]()
    torch.set_num_threads(threads[0])
    for name in names:
        try:
            torch.manual_seed(0)
            step = COLUMNS[name].make(work)
            step()
            repeats[name] = max(1, int(SHORTEST / seconds(step, 1)))
            steps[name] = step
        except Exception as error:  # a peer may refuse a model in any way
            reason = (str(error).splitlines() or [""])[0]
            row.missing[name] = f"{type(error).__name__}: {reason}"[:120]
    keys = [(name, t) for t in threads for name in steps if t == 1 or COLUMNS[name].scales]
    row.seconds = {key: [] for key in keys}
    started, turns = time.perf_counter(), 0
    while turns < LEAST_TURNS or (turns < MOST_TURNS and time.perf_counter() - started < most):
        turns += 1
        for name, t in keys:
            if turns > COLUMNS[name].turns:
                continue
            if torch.get_num_threads() != t:
                torch.set_num_threads(t)
                steps[name]()  # wakes the threads
            row.seconds[name, t].append(seconds(steps[name], repeats[name]))
    for step in steps.values():
        if isinstance(step, PrivateLoop):
            step.close()
    return row


def resident(which: str) -> float:
    """MiB of this process that are in memory now ("VmRSS"; "RssFile": code and other files), or
    were at most ("VmHWM").
    """
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(which)).split()[1]) / 1024


def one_alone(work: Workload, name: str) -> float:
    """MiB at the peak of making and taking a step, above libraries, model and batch; in a process
    of its own.

    Pages of files that a step reads in are left out: they are the libraries' code, which all
    processes share.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    COLUMNS[name].make(WORKLOADS[SMALLEST])()  # the allocator's and libraries' own
    square = torch.ones(64, 64)
    onednn.by_onednn(square, square @ square)
    gc.collect()
    before, files = resident("VmRSS"), resident("RssFile")
    model, x, y = made(work, "cpu")
    held = sum(each.numel() * each.element_size() for each in (*model.parameters(), x, y))
    del model, x, y
    step = COLUMNS[name].make(work)
    for _ in range(2):
        step()
    # getrusage's would begin with that of the process that started this one
    return resident("VmHWM") - before - (resident("RssFile") - files) - held / 2**20


def peaks(work: str, names: Sequence[str], processes: int) -> dict[str, float]:
    """Medians of `one_alone` over several processes, two at a time: the system's counts differ
    from one to the next.
    """

    def peak(name: str) -> float | None:
        command = [sys.executable, __file__, "--one", work, name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return float(done.stdout.split()[-1]) if done.returncode == 0 else None

    found: dict[str, list[float]] = {}
    asked = [name for _ in range(processes) for name in names if name in IN_MEMORY]
    with ThreadPoolExecutor(2) as pool:
        for name, mib in zip(asked, pool.map(peak, asked), strict=True):
            if mib is not None:
                found.setdefault(name, []).append(mib)
    return {name: statistics.median(each) for name, each in found.items()}


def lines_of(title: str, row: Row, names: Sequence[str]) -> list[dict[str, object]]:
    """The row for the CSV, a line for each column and number of threads."""
    lines: list[dict[str, object]] = []
    for name, threads in [*row.seconds, *((name, 1) for name in row.missing)]:
        taken, ratio = row.seconds.get((name, threads)), row.ratio((name, threads))
        median = statistics.median(taken) if taken else None
        peak = row.peak.get(name) if threads == 1 else None
        lines.append(
            {
                "workload": title,
                "variant": name,
                "threads": threads,
                "milliseconds": f"{median * 1e3:.4g}" if median else "",
                "ratio": f"{ratio:.3g}" if ratio else "",
                "beside": COLUMNS[name].beside,
                "samples_per_second": f"{row.records / median:.4g}" if median else "",
                "turns": len(taken or ()),
                "peak_mib": "" if peak is None else f"{peak:.0f}",
                "missing": row.missing.get(name, ""),
            }
        )
    return sorted(lines, key=lambda line: (line["threads"], names.index(str(line["variant"]))))


def time_table(rows: dict[str, Row], threads: Sequence[int]) -> str:
    """Multiples of what stands beside each column, of plain ones milliseconds: with each number
    of threads, in this order.
    """
    used = [
        name
        for name in COLUMNS
        if any(name == key[0] for row in rows.values() for key in row.seconds)
    ]
    titles = [name + (", ms" if name in (PLAIN, LOOP) else "") for name in used]
    out = [f"| work | {' | '.join(titles)} |", "|---" * (len(used) + 1) + "|"]
    for title, row in rows.items():
        cells = []
        for name in used:
            keys = [key for t in threads if (key := (name, t)) in row.seconds]
            if name in (PLAIN, LOOP):
                of_threads = [f"{statistics.median(row.seconds[key]) * 1e3:.3g}" for key in keys]
            else:
                of_threads = [f"{row.ratio(key):.2f}" for key in keys]
            cells.append(", ".join(of_threads) or "-")
        out.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(out)


def memory_table(rows: dict[str, Row]) -> str:
    """MiB, and ours as a multiple of plain; less than one cannot be told from none."""
    used = [name for name in IN_MEMORY if any(name in row.peak for row in rows.values())]
    out = [f"| work | {' | '.join(used)} | ours / plain |", "|---" * (len(used) + 2) + "|"]
    for title, row in rows.items():
        peaks = {name: max(0.0, peak) for name, peak in row.peak.items()}
        cells = [f"{peaks[name]:,.0f}" if name in peaks else "-" for name in used]
        both = "ours, noise" in peaks and peaks.get(PLAIN, 0.0) >= 1
        share = f"{peaks['ours, noise'] / peaks[PLAIN]:.2f}" if both else "-"
        out.append(f"| {title} | {' | '.join(cells)} | {share} |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", default=ROWS, choices=list(WORKLOADS))
    parser.add_argument("--columns", nargs="*", choices=list(COLUMNS))
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each row's turns")
    parser.add_argument("--processes", type=int, default=1, help="that memory is the median of")
    parser.add_argument("--out", type=Path, help="folder for step_time.csv and step_time.png")
    parser.add_argument("--docs", type=Path, help="page that the tables are written into")
    parser.add_argument(
        "--keep-freed", action="store_true", help="dpoptim.keep_freed_memory() before all steps"
    )
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.one:
        print(one_alone(WORKLOADS[options.one[0]], options.one[1]))
        return
    if options.keep_freed:
        dpoptim.keep_freed_memory()
    console, rows = Console(width=200), dict[str, Row]()
    lines: list[dict[str, object]] = []
    for title in options.rows:
        started = time.perf_counter()
        asked = options.columns or [
            name for name in COLUMNS if "compiled" not in name or title in TO_COMPILE
        ]
        wanted = {*asked, PLAIN, *(COLUMNS[name].beside for name in asked)}
        names = [name for name in COLUMNS if name in wanted]
        row = measure(WORKLOADS[title], names, options.threads, options.seconds)
        gc.collect()
        if options.processes:
            row.peak = peaks(title, [n for n in names if n not in row.missing], options.processes)
        rows[title] = row
        lines += lines_of(title, row, names)
        if options.out is not None:
            save_csv(lines, options.out / "step_time.csv")
        found = ", ".join(f"{n} x{t} {row.ratio((n, t)):.2f}" for n, t in row.seconds)
        console.print(f"{title} ({time.perf_counter() - started:.0f} s): {found}")
    tables = {"times": time_table(rows, options.threads)}
    if options.processes:
        tables["memory"] = memory_table(rows)
    for table in tables.values():
        print(f"\n{table}")
    if options.docs is not None:
        write_between(options.docs, tables, "step_time")
    if options.out is not None:
        draw(rows, options.out / "step_time.png")


def draw(rows: dict[str, Row], path: Path) -> None:
    """Ratios to plain, a group for each workload."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    titles = list(rows)
    keys = dict.fromkeys(
        key for row in rows.values() for key in row.seconds if not key[0].startswith(PLAIN)
    )
    figure, axis = plt.subplots(figsize=(1.5 + 1.3 * len(titles), 3.8), layout="constrained")
    for i, (name, threads) in enumerate(keys):
        found = {title: row.ratio((name, threads)) for title, row in rows.items()}
        here = {title: ratio for title, ratio in found.items() if ratio}
        places = [titles.index(t) + (i - len(keys) / 2) * 0.8 / len(keys) for t in here]
        label = name if threads == 1 else f"{name}, {threads} threads"
        axis.bar(places, list(here.values()), 0.8 / len(keys), label=label)
    axis.axhline(1, color="#6b7280", linewidth=0.8)
    axis.set_yscale("log")
    axis.set_xticks(range(len(titles)), titles, rotation=35, ha="right")
    axis.set_ylabel("times the plain step")
    axis.legend(fontsize=7, frameon=False, ncols=7, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
