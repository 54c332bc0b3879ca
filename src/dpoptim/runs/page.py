"""The frame of every page that commands write: one HTML file in the report's style.

Nothing is fetched and no script runs: it reads the same in an e-mail, on paper and in ten years.
"""

import html
from collections.abc import Iterable, Sequence

from dpoptim.printable import printable
from dpoptim.runs.report_style import STYLE
from dpoptim.version import __version__

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action "
    "'none'"
)

CHOSEN = ' class="chosen"'


def page(kind: str, title: str, remark: str, sections: Iterable[str], footer: str) -> str:
    """A whole page.

    Args:
        kind: such as "Privacy report". title, remark: for its top; plain text. sections: HTML.
        footer: plain text.
    """
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(kind)}: {escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n<header><span><strong>{escape(kind)}</strong></span>"
        f"<span>{escape(remark)}</span></header>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(sections)
        + f"\n<footer>{escape(footer)} dpoptim {escape(__version__)}</footer>\n</main>\n"
        "</body>\n</html>\n"
    )


def escape(text: str) -> str:
    """Text from elsewhere for a page: no markup, and no control or direction characters."""
    return html.escape(printable(text))


def figure(svg: str, caption: str) -> str:
    """A picture with its caption, which is also what a screen reader says."""
    label = escape(caption)
    return f'<figure role="img" aria-label="{label}">{svg}<figcaption>{label}</figcaption></figure>'


def pairs(rows: Iterable[tuple[str, str]], kind: str = "") -> str:
    """A table of names and values."""
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f'<table class="{kind}"><tbody>{body}</tbody></table>'


def grid(headings: Sequence[str], rows: Iterable[Sequence[str]], marked: int | None = None) -> str:
    """A table with headings, which scrolls sideways where a page is narrow.

    Args:
        marked: the row that stands out.
    """
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in headings)
    body = "".join(
        f"<tr{CHOSEN if number == marked else ''}>"
        + "".join(f"<td>{escape(value)}</td>" for value in row)
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return (
        f'<div class="scroll"><table class="grid"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def bullets(items: Iterable[str]) -> str:
    """A list."""
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def facts(cells: Iterable[tuple[str, str, str]]) -> str:
    """Key figures: a name, a value, and a remark each."""
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"
        for name, value, remark in cells
    )
    return f'<dl class="facts">{rows}</dl>'


def percent(share: float) -> str:
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def number(value: float) -> str:
    """Three decimals."""
    return f"{value:.3f}".replace("-", "\N{MINUS SIGN}")


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
