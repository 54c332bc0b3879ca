"""What notebooks show of plans, guarantees, runs and ledgers: the lines that `describe` prints, as
a small table.
"""

import re
from html import escape


def as_table(description: str) -> str:
    """HTML of a text whose first line is a heading, and whose others are ``  label   text``; all
    escaped.
    """
    heading, *lines = description.splitlines()
    rows = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines if line.strip()]
    cells = "".join(
        f"<tr><td style='text-align:left'>{escape(label)}</td><td "
        f"style='text-align:left'>{escape(' '.join(rest))}</td></tr>"
        for label, *rest in rows
    )
    return f"<b>{escape(heading)}</b><table>{cells}</table>"
