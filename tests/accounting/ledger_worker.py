"""A process of its own for the ledger's tests: forks children that race for a budget, or that get
killed.

Commands arrive on stdin, answers go to stdout, one line each:

* `race PATH COUNT NOISE`: COUNT children reserve one Gaussian at the same moment; prints "won",
  "refused" or "error: ..." for each.
* `crash PATH`: prints "pid N", then that child reserves again and again and prints "got ID" once
  `reserve` has returned; "dead" follows its end.
"""

import os
import sys

import dp_accounting as dp

from dpoptim.accounting.ledger import BudgetExceeded, Ledger

AR = "add-or-remove-one"


def say(text: str) -> None:
    # unbuffered, and one write is one line also between processes
    os.write(1, (text + "\n").encode())


def race(path: str, count: int, noise: float) -> None:
    gate, opener = os.pipe()
    children = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(opener)
                os.read(gate, 1)  # returns for all at once, when the parent closes the other end
                Ledger(path).reserve(
                    dp.GaussianDpEvent(noise), neighboring=AR, label=f"racer {number}"
                )
                say("won")
            except BudgetExceeded:
                say("refused")
            except BaseException as error:  # the test must see whatever it was
                say(f"error: {error!r}")
            finally:
                os._exit(0)
        children.append(pid)
    os.close(gate)
    os.close(opener)
    for pid in children:
        os.waitpid(pid, 0)


def crash(path: str) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            say(f"pid {os.getpid()}")
            ledger = Ledger(path)
            for number in range(10_000):
                event = dp.GaussianDpEvent(10.0 + number)
                say("got " + ledger.reserve(event, neighboring=AR, label=f"run {number}").id)
        except BaseException as error:
            say(f"error: {error!r}")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    say("dead")


if __name__ == "__main__":
    say("ready")
    for line in sys.stdin:
        command, path, *rest = line.rstrip("\n").split("\t")
        if command == "race":
            race(path, int(rest[0]), float(rest[1]))
        else:
            crash(path)
