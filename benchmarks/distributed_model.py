"""Steps of many ranks, by a model of alpha and beta, from what benchmarks/distributed.py counted
and timed; and both as tables of the guide.

A collective of b bytes costs alpha for each message in a row, and beta b; with a fixed batch on
each rank, so compute stays and communication grows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dpoptim.distributed.exchange import stretches
from saving import write_between

NETWORKS = {  # seconds a message, seconds a byte
    "Ethernet 10 Gbit/s": (50e-6, 8 / 10e9),
    "InfiniBand 200 Gbit/s": (5e-6, 8 / 200e9),
}
RANKS = (2, 8, 32, 128, 512, 1000)
NOISE = 4e-9  # seconds a number; see docs/speed.md


def communication(
    size: int, parameters: int, network: tuple[float, float], small: float | None
) -> float:
    """Seconds a step beyond computing.

    Args:
        small: collectives of a few bytes in a private step, as counted; None: plain DDP, one ring
            all-reduce in float32. Private: each rank sends every other one its part in float64
            (pairwise), then a ring all-gather in float32, both stretch by stretch; that the next
            one travels meanwhile is not counted. Small ones take a message of each rank in a row
            where all gather, which is taken for all.
    """
    alpha, beta = network
    share = (size - 1) / size
    if small is None:
        return 2 * (size - 1) * alpha + 2 * share * 4 * parameters * beta
    times = len(stretches(-(-parameters // size), size))
    vectors = 2 * times * (size - 1) * alpha + share * (8 + 4) * parameters * beta
    return vectors + small * (size - 1) * alpha


def modelled(row: Mapping[str, str]) -> list[dict[str, object]]:
    """Efficiency (computing over the whole step) of plain and private for one workload: its batch
    on each rank, its computing time as measured in one process.
    """
    if not (row["plain, one ms"] and row["private, one ms"]):
        return []
    parameters, small = int(row["parameters"]), float(row["small, DDP"])
    computing = {who: float(row[f"{who}, one ms"]) / 1e3 for who in ("plain", "private")}
    rows: list[dict[str, object]] = []
    for network, figures in NETWORKS.items():
        for size in RANKS:
            wait = {
                "plain": communication(size, parameters, figures, None),
                "private": communication(size, parameters, figures, small),
            }
            # what a rank no longer draws
            busy = computing | {
                "private": computing["private"] - NOISE * parameters * (1 - 1 / size)
            }
            step = {who: busy[who] + wait[who] for who in wait}
            rows.append(
                {
                    "workload": row["workload"],
                    "network": network,
                    "ranks": size,
                    **{f"{who} waits ms": f"{wait[who] * 1e3:.4g}" for who in wait},
                    **{f"{who} efficiency": f"{busy[who] / step[who]:.3f}" for who in wait},
                    "private over plain": f"{step['private'] / step['plain']:.3g}",
                }
            )
    return rows


# ---- the guide ----------------------------------------------------------------------------------

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "many-processes.md"
LARGE_MODEL = 120_000_000  # parameters of the guide's example


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def steps_table(rows: Sequence[Mapping[str, str]]) -> str:
    """What was timed: milliseconds, and what they are of plain training's."""

    def cell(row: Mapping[str, str], who: str, kind: str) -> str:
        taken = row[f"{who}, {kind} ms"]
        over = row[f"{who} over plain, {kind}"]
        return f"{float(taken):.0f} ({float(over):.2f})" if taken else "fails"

    head = ["", *(row["workload"] for row in rows)]
    body = [
        [f"plain, {kind}, ms", *(f"{float(row[f'plain, {kind} ms']):.0f}" for row in rows)]
        for kind in ("one", "DDP", "FSDP2")
    ]
    body += [
        [f"{who}, {kind}, ms (of plain)", *(cell(row, who, kind) for row in rows)]
        for who in ("private", "Opacus")
        for kind in ("one", "DDP", "FSDP2")
    ]
    for kind in ("DDP", "FSDP2"):
        shares = [row[f"beyond one process, {kind}"] for row in rows]
        body.append([f"private over plain, {kind}, of that in one process", *shares])
    body.append(["sent a step by a rank, bytes a parameter, DDP", *map(sent_each, rows)])
    for where, when in (("start", "attach"), ("step", "a step")):
        title = f"most memory of a rank in {when}, FSDP2, over plain's in a step, MiB"
        body.append([title, *(memory_cell(row, where) for row in rows)])
    return table(head, body)


def memory_cell(row: Mapping[str, str], where: str) -> str:
    private, plain = row[f"private, FSDP2 {where} MiB"], row["plain, FSDP2 step MiB"]
    if not plain:
        return "too small"
    return f"{private} / {plain} = {float(private) / float(plain):.3g}"


def sent_each(row: Mapping[str, str]) -> str:
    return f"{float(row['bytes, DDP']) / float(row['parameters']):.2f}"


def model_table(small: float) -> str:
    """Seconds that a step waits beyond computing, private (plain), for `LARGE_MODEL`."""

    def cell(size: int, network: tuple[float, float]) -> str:
        waits = [communication(size, LARGE_MODEL, network, each) for each in (small, None)]
        return "{:.2g} ({:.2g})".format(*waits)

    rows = [[name, *(cell(size, network) for size in RANKS)] for name, network in NETWORKS.items()]
    return table(["", *(f"{size} ranks" for size in RANKS)], rows)


def write_tables(rows: Sequence[Mapping[str, str]], guide: Path = GUIDE) -> None:
    """Put the tables between the guide's marks."""
    small = max(float(row["small, DDP"]) for row in rows)
    tables = {"steps": steps_table(rows), "model": model_table(small)}
    write_between(guide, {name: f"\n{made}\n" for name, made in tables.items()}, "distributed")
