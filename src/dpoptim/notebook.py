"""Plans, guarantees, runs and ledgers in notebooks: what `describe` prints, as a table."""

import re
from html import escape


def as_table(description: str) -> str:
    """HTML of a heading and lines of `` label text``; all escaped."""
    heading, *lines = description.splitlines()
    rows = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines if line.strip()]
    cells = "".join(
        f"<tr><td style='text-align:left'>{escape(label)}</td><td "
        f"style='text-align:left'>{escape(' '.join(rest))}</td></tr>"
        for label, *rest in rows
    )
    return f"<b>{escape(heading)}</b><table>{cells}</table>"
