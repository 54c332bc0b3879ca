"""``python -m torture`` in tests/: all trials, with counts; ends with an error if one of them went
wrong.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from torture import data_files, full_disk, kills, memory, mutations, targets  # noqa: F401 (two register)
from torture.outcomes import Outcomes

LEDGER_KIBIBYTES = 128


def run(seed: int, scale: float, only: str | None) -> list[Outcomes]:
    """All trials; `scale` 1 is 1,000 kills and 1,000 mutations of each kind of file."""
    many = max(1, round(1000 * scale))
    trials = {f"mutations {name}": lambda place, name=name: mutations.trial(
                  name, place, seed=seed, attempts=many)
              for name in mutations.TARGETS}  # fmt: skip
    trials["memory"] = lambda place: memory.trial(place, seed=seed, every=max(1, round(1 / scale)))
    trials["disk"] = lambda place: full_disk.trial(
        place, seed=seed, up_to=round(LEDGER_KIBIBYTES * min(1, scale))
    )
    trials["kills"] = lambda place: kills.trial(place, seed=seed, kills=many)
    found = []
    for name, trial in trials.items():
        if only is not None and only not in name:
            continue
        shared = Path("/dev/shm")  # kills need no disk to survive
        with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as place:
            started = time.perf_counter()
            outcomes = trial(Path(place))
        print(f"{outcomes}  [{time.perf_counter() - started:.0f} s]", flush=True)
        found.append(outcomes)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="another one makes other trials")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="share of 1,000 kills and mutations of each kind"
    )
    parser.add_argument("--only", help="trials whose name contains this")
    options = parser.parse_args()
    print(f"seed {options.seed}, scale {options.scale:g}", flush=True)
    found = run(options.seed, options.scale, options.only)
    wrong = sum(len(outcomes.wrong) for outcomes in found)
    print(f"{wrong} wrong")
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    sys.exit(main())
