"""Reading a whole ledger again: structure, chain, entries, and what the budget admitted."""

import json

from dpoptim.accounting.budget import Budget
from dpoptim.accounting.event_json import event_from_json
from dpoptim.accounting.ledger_runs import Runs
from dpoptim.accounting.ledger_schema import Kind
from dpoptim.accounting.ledger_store import LedgerStore
from dpoptim.errors import LedgerError


def verify(store: LedgerStore, budget: Budget | None, neighboring: str, digest: str | None) -> int:
    """The number of entries; see `Ledger.verify`.

    Raises LedgerError for anything that is not as it should be.
    """
    store.identify()
    at, runs = store.start(), Runs(store.start(), neighboring, store.settings.unit)
    entries, head = store.read(at)
    seen = {at.digest}
    for entry in entries:
        if entry.kind == Kind.RESERVED and budget is not None:
            runs.admit([event_from_json(json.loads(entry.body))], budget, store.settings.dataset)
        at = entry.after(at)
        seen.add(at.digest)
        runs.add([entry], at)
    if digest is not None and digest not in seen:
        raise LedgerError(
            f"no state of this ledger has the digest {digest}: it was written anew, or replaced by "
            "an older copy"
        )
    return head.count
