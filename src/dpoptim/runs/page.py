"""The frame of every page that commands write: one HTML file, and its style.

Nothing is fetched and no script runs: it reads the same in an e-mail, on paper and in ten years.
"""

import html
from collections.abc import Iterable, Sequence

from dpoptim.printable import printable
from dpoptim.version import __version__

STYLE = """
:root { color-scheme: light dark;
  --ink: #1a2431; --muted: #5b6675; --line: #d5dae1; --accent: #0060a8; --warm: #b04a00; --paper: #ffffff;
  --back: #f4f5f7; --good: #006b54; --bad: #a3261b; --soft: #eef4fa; --alert: #fdf1e7; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e8ecf1; --muted: #a3aebc; --line: #36404d; --accent: #6cb6f2; --warm: #f29a52; --paper: #171d25;
  --back: #0e1319; --good: #4cc7a4; --bad: #ff8a7a; --soft: #1b2735; --alert: #33261a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); line-height: 1.5; overflow-wrap: break-word;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; font-size: 16px;
  -webkit-text-size-adjust: 100%; }
main { max-width: 1080px; margin: 0 auto; padding: 48px 40px 40px; }
h1, h2, h3, p, dl, dd, ul, figure { margin: 0; padding: 0; }
header { display: flex; flex-wrap: wrap; gap: 4px 24px; justify-content: space-between; align-items: baseline;
  color: var(--muted); font-size: 14px; }
header strong { color: var(--ink); letter-spacing: .01em; }
h1 { font-size: 34px; line-height: 1.2; font-weight: 650; letter-spacing: -.015em; margin: 14px 0 28px; }
h1::first-letter { text-transform: uppercase; }
a { color: inherit; }
h2 { font-size: 22px; line-height: 1.3; font-weight: 650; letter-spacing: -.01em; margin-bottom: 8px; }
h3 { font-size: 16px; font-weight: 650; margin-bottom: 10px; }
section { margin-top: 48px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 12px; padding: 28px 32px; }
.hero { display: grid; grid-template-columns: minmax(250px, 4fr) 7fr; gap: 24px 48px; align-items: center;
  border-top: 5px solid var(--tone); padding: 36px 40px; }
.proven { --tone: var(--good); } .unproven, .marked { --tone: var(--warm); } .none { --tone: var(--bad); }
.badge { display: inline-block; color: var(--tone); border: 1.5px solid var(--tone); border-radius: 99px;
  font-size: 14px; font-weight: 650; line-height: 1.35; padding: 3px 13px; }
.epsilon { font-size: 76px; line-height: 1.1; font-weight: 680; letter-spacing: -.035em; white-space: nowrap;
  margin: 10px 0 4px; font-variant-numeric: tabular-nums; }
.epsilon .long { font-size: 54px; }
.epsilon small { font-size: 44px; font-weight: 400; color: var(--muted); letter-spacing: 0; }
.unproven .epsilon, .marked .epsilon, .none .epsilon { color: var(--tone); }
.terms { color: var(--muted); margin-bottom: 4px; }
.reading + .terms { margin-top: 12px; }
.terms span { white-space: nowrap; }
.reading { font-size: 21px; line-height: 1.45; }
.note { color: var(--warm); font-weight: 600; margin-top: 12px; }
.small { color: var(--muted); font-size: 14px; }
.meter { margin-top: 20px; }
.here { position: relative; height: 26px; }
.here b { position: absolute; transform: translateX(-50%); color: var(--accent); font-size: 15px; white-space: nowrap; }
.track { position: relative; height: 10px; border-radius: 5px; background: var(--line); }
.fill { height: 100%; min-width: 4px; border-radius: 5px; background: var(--accent); }
.scale { display: flex; justify-content: space-between; gap: 12px; color: var(--muted); font-size: 13px;
  margin-top: 7px; }
.scale span { text-align: right; } .scale span:first-child { text-align: left; white-space: nowrap; }
.facts { display: flex; flex-wrap: wrap; gap: 1px; margin-top: 16px;
  background: var(--line); border: 1px solid var(--line); border-radius: 12px; overflow: hidden; }
.facts div { flex: 1 1 140px; background: var(--paper); padding: 16px 20px; }
.facts dt { color: var(--muted); font-size: 13px; }
.facts dd { font-size: 24px; font-weight: 620; letter-spacing: -.01em; line-height: 1.3;
  font-variant-numeric: tabular-nums; }
.facts dd small { display: block; font-size: 13px; font-weight: 400; letter-spacing: 0; color: var(--muted); }
.beside { display: grid; grid-template-columns: 1fr 1fr; gap: 24px 48px; align-items: center; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; }
.beside > *, .pair > *, .hero > * { min-width: 0; }
figure svg { display: block; width: 100%; max-width: 460px; height: auto; overflow: visible; }
figure svg text { font-family: inherit !important; }
.wide figure svg { max-width: 600px; }
figcaption { color: var(--muted); font-size: 14px; margin-top: 10px; }
.lead { max-width: 46em; margin-bottom: 18px; color: var(--muted); }
ul { list-style: none; }
ul li { position: relative; padding: 9px 0 9px 28px; border-top: 1px solid var(--line); }
ul li:first-child { border-top: 0; }
ul li::before { position: absolute; left: 2px; font-weight: 700; color: var(--mark); content: var(--sign); }
.enforced { --mark: var(--good); --sign: "\\2713"; } .trusted { --mark: var(--muted); --sign: "\\25CB"; }
.open { --mark: var(--warm); --sign: "!"; background: var(--alert); border-color: var(--warm); margin-bottom: 16px; }
.open h3 { color: var(--warm); }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 15px; }
th, td { text-align: left; font-weight: 400; padding: 8px 0; border-top: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
tr:first-child > * { border-top: 0; }
th { color: var(--muted); padding-right: 20px; width: 46%; }
table.numbers td { text-align: right; font-weight: 600; white-space: nowrap; }
table.numbers th { width: auto; color: var(--ink); }
.scroll { overflow-x: auto; background: linear-gradient(90deg, transparent, var(--paper) 90%) right / 40px 100% no-repeat local,
  linear-gradient(90deg, transparent, var(--line)) right / 14px 100% no-repeat; } /* a shade where there is more */
table.grid { font-size: 14px; }
table.grid th { width: auto; overflow-wrap: normal; color: var(--muted); font-size: 13px; padding-right: 14px; }
table.grid td { padding-right: 14px; white-space: nowrap; }
table.grid thead tr > * { border-top: 0; } table.grid tbody tr:first-child > * { border-top: 1px solid var(--line); }
tr.chosen td { color: var(--warm); font-weight: 650; }
.below, .below + .small { margin-top: 16px; }
.confusion td { background: color-mix(in srgb, var(--accent) calc(var(--share) / 2), transparent); }
table.confusion td, table.confusion th:not(:first-child) { text-align: right; padding-left: 10px; }
.columns { columns: 2; column-gap: 16px; }
.columns .card { break-inside: avoid; margin-bottom: 16px; }
pre { background: var(--soft); border-radius: 8px; padding: 16px 18px; margin: 14px 0; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 14px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
footer { margin-top: 40px; color: var(--muted); font-size: 13px; }
@media (max-width: 760px) {
  main { padding: 24px 16px 32px; } h1 { font-size: 26px; margin-bottom: 20px; } section { margin-top: 36px; }
  .card { padding: 20px; } .hero { padding: 24px 20px; } .epsilon { font-size: 60px; } .reading { font-size: 18px; }
  .hero, .beside, .pair { grid-template-columns: minmax(0, 1fr); } .columns { columns: 1; }
  figure svg { width: calc(100% + 28px); margin-left: -14px; }
  .facts div { flex-basis: calc(50% - 1px); padding: 12px 16px; }
  .facts dd { font-size: 20px; } }
@media print {
  :root { color-scheme: light; --ink: #000; --muted: #444; --line: #ccc; --accent: #0060a8; --warm: #a04400;
    --paper: #fff; --back: #fff; --good: #005a46; --bad: #90180e; --soft: #f3f3f3; --alert: #fff; }
  body { font-size: 11pt; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  main { max-width: none; padding: 0; } section { margin-top: 24pt; }
  .card, .facts, figure, tr, li { break-inside: avoid; } h2, h3 { break-after: avoid; } }
"""


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


def section(heading: str, body: str, lead: str = "") -> str:
    """A section of the page. Args: heading, body, lead: HTML; the lead comes first."""
    first = f'<p class="lead">{lead}</p>' if lead else ""
    return f"<section><h2>{heading}</h2>{first}{body}</section>"


def card(body: str, kind: str = "") -> str:
    """A card around HTML."""
    return f'<div class="{f"card {kind}".strip()}">{body}</div>'


def hero(
    kind: str, badge: str, epsilon: str, terms: Iterable[str], beside: str, below: str = ""
) -> str:
    """The card at the top: a guarantee.

    Args:
        kind: of the verdict, a class of `STYLE`. badge, terms: plain text. epsilon, beside, below:
            HTML.
    """
    said = " · ".join(f"<span>{escape(term)}</span>" for term in terms)
    return card(
        f'<div><span class="badge">{escape(badge)}</span><p class="epsilon">{epsilon}</p>'
        f'<p class="terms">{said}</p>{below}</div><div>{beside}</div>',
        f"hero {kind}",
    )


def at_most(epsilon: str) -> str:
    """A bound on epsilon in large type."""
    long = "long" if len(epsilon) > len("2.00") else ""
    return f'ε <small>≤</small> <span class="{long}">{escape(epsilon)}</span>'


def meter(share: float, here: str, low: str, high: str) -> str:
    """A bar that is filled by a share, with plain text at its end and below both ends."""
    way = f"{share:.1%}"
    return (
        f'<div class="meter"><div class="here"><b style="left:clamp(5em,{way},100% - 5em)">'
        f'{escape(here)}</b></div><div class="track"><div class="fill" style="width:{way}"></div>'
        f'</div><div class="scale"><span>{escape(low)}</span><span>{escape(high)}</span></div></div>'
    )


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
