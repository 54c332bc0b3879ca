"""The gate: the one place that adds privacy noise, and that charges for it.

Before it everything is private; what it releases may be logged, plotted and saved. It reserves
the whole run in the ledger before the first noisy sum exists, so a crash can only count too much.
"""

from dpoptim.gate.adaptive import FilteredGate
from dpoptim.gate.choices import SelectionGate, TrialsGate, event_ahead
from dpoptim.gate.planned import Gate
from dpoptim.gate.queries import CorrelatedSum, GaussianSum, Query, SelectedRows
from dpoptim.gate.together import charged_together

__all__ = [
    "CorrelatedSum",
    "FilteredGate",
    "Gate",
    "GaussianSum",
    "Query",
    "SelectedRows",
    "SelectionGate",
    "TrialsGate",
    "charged_together",
    "event_ahead",
]
