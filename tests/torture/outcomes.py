"""What came of many attempts, counted; a count that must be zero and is not makes the trial
fail.
"""

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from dpoptim.errors import LedgerError, PrivacyError

PATIENCE = 20  # seconds after which an attempt hangs
CLEAR = (ValueError, OSError, PrivacyError, LedgerError)


class Hang(BaseException):
    """Not an Exception, so that no handler takes it for one."""


@dataclass
class Outcomes:
    """Counts by name, and the first of what should not have been."""

    title: str
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, name: str, *, wrong: str | None = None) -> None:
        """Count an attempt; `wrong` says what should not have been."""
        self.counts[name] += 1
        if wrong is not None:
            self.wrong.append(f"{name}: {wrong}")

    def attempt(self, work: Callable[[], str], what: str) -> None:
        """Do `work`, which names what came of it, and count that or the error it ends with."""
        try:
            with patience():
                self.add(work())
        except CLEAR as error:
            text = str(error)
            raw = isinstance(error, (UnicodeError, json.JSONDecodeError))
            if raw or "\n" in text or len(text) < 20:
                self.add("tracebacks", wrong=f"{what}: {type(error).__name__} says {text!r}")
            else:
                self.add("clear errors")
        except Hang:
            self.add("hangs", wrong=what)
        except Changed as changed:
            self.add("silently changed", wrong=f"{what}: {changed}")
        except Exception as error:
            self.add("tracebacks", wrong=f"{what}: {type(error).__name__}: {error}")

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        lines = [
            f"{self.title}: {counts or 'nothing'}",
            *(f"    WRONG {text[:400]}" for text in self.wrong[:10]),
        ]
        return "\n".join(lines)


class Changed(Exception):
    """A file was accepted, and says something else than before."""


@contextmanager
def patience() -> Iterator[None]:
    """Raise `Hang` if the `with` takes too long. In the main thread alone."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
