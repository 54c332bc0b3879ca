"""Files with bytes flipped, cut out, doubled or overwritten: each is refused in one line, or means
the same.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torture.outcomes import Changed, Outcomes


@dataclass(frozen=True)
class Target:
    """A kind of file.

    Attributes:
        make: writes a good one into a folder and returns its path.
        read: what it means, comparable; raises what a user would see.
        faithful: whether any other meaning than the good one's is a fault. Of a table, which is
            only numbers, it is not: any numbers are a table.
        mend: makes a damaged content look whole again, such as by the checksum that it then has.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    faithful: bool = True
    mend: Callable[[bytes], bytes] = bytes


TARGETS: dict[str, Target] = {}


def register(name: str, target: Target) -> None:
    """Make a kind of file part of ``make torture``."""
    TARGETS[name] = target


def mutate(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """One random damage, and what it was."""
    place = chance.randrange(len(content))
    length = min(chance.choice([1, 1, 4, 64, 512]), len(content) - place)
    kind = chance.choice(
        ["flip", "flip", "flip", "flip", "cut", "truncate", "zero", "noise", "double"]
    )
    head, middle, tail = content[:place], content[place : place + length], content[place + length :]
    match kind:
        case "flip":
            middle = bytes([middle[0] ^ (1 << chance.randrange(8))]) + middle[1:]
        case "cut":
            middle = b""
        case "truncate":
            middle = tail = b""
        case "zero":
            middle = bytes(length)
        case "noise":
            middle = chance.randbytes(length)
        case _:
            middle = middle * 2
    return head + middle + tail, f"{kind} {length} at {place}"


def trial(name: str, folder: Path, *, seed: int, attempts: int) -> Outcomes:
    """So many mutations of one kind of file."""
    target, chance = TARGETS[name], random.Random(f"{seed} {name}")
    outcomes = Outcomes(f"mutations of a {name}")
    path = target.make(folder)
    good = path.read_bytes()
    right = target.read(path)
    for number in range(attempts):
        content, what = mutate(good, chance)
        path.write_bytes(target.mend(content))

        def read() -> str:
            found = target.read(path)
            if found == right:
                return "read the same"
            if target.faithful:
                raise Changed(f"{found!r}"[:200])
            return "read as other data"

        outcomes.attempt(read, f"{name}, seed {seed}, attempt {number}: {what}")
        # journals that a damaged header asks for
        for beside in path.parent.glob(f"{path.name}-*"):
            beside.unlink()
    path.write_bytes(good)
    return outcomes
