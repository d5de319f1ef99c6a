"""One self-contained page of HTML: its frame and its style, for screens, phones, dark rooms and
paper."""

from __future__ import annotations

from html import escape

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --quiet: #5b6675; --line: #dde2e8;
  --paper: #ffffff; --card: #f6f8fa; --pass: #17723a; --fail: #b3261e; --accent: #2459c4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --quiet: #9aa5b4; --line: #333c48;
  --paper: #14181e; --card: #1c222b; --pass: #58c27f; --fail: #ff8a80; --accent: #82a8ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 2.1rem; line-height: 1.15; margin: 0 0 .5rem; letter-spacing: -.01em; }
h1.pass { color: var(--pass); } h1.fail { color: var(--fail); }
h2 { font-size: 1.15rem; line-height: 1.3; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; } .eyebrow { color: var(--quiet); margin: 0 0 .3rem; font-size: .9rem; }
.lead { color: var(--quiet); font-size: 1.05rem; margin-bottom: 1.8rem; }
.note { color: var(--quiet); font-size: .9rem; }
.card { background: var(--card); border: 1px solid var(--line); border-left: 5px solid var(--pass);
  border-radius: 8px; padding: 1rem 1.2rem; margin: 0 0 .9rem; break-inside: avoid; }
.card.fail { border-left-color: var(--fail); } .card h2 { margin: 0 0 .3rem; }
.badge { font-size: .72rem; font-weight: 700; text-transform: uppercase; letter-spacing: .06em;
  padding: .15rem .5rem; border-radius: 99px; color: var(--paper); vertical-align: .12em; }
.badge.pass { background: var(--pass); } .badge.fail { background: var(--fail); }
.counts { display: flex; flex-wrap: wrap; gap: .5rem 1.8rem; margin: .7rem 0 .2rem; }
.counts b { display: block; font-size: 1.25rem; line-height: 1.2;
  font-variant-numeric: tabular-nums; }
.counts span { color: var(--quiet); font-size: .85rem; }
.findings { margin: .8rem 0 0; padding-left: 1.1rem; color: var(--fail); overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; margin: .6rem 0;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .38rem .8rem .38rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--quiet); font-weight: 600; } .facts th { width: 9rem; white-space: nowrap; }
.facts td { overflow-wrap: anywhere; }
td.number, th.number { text-align: right; } td.number { white-space: nowrap; }
code { font: .82rem/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
figure { margin: 0; break-inside: avoid; } figcaption { color: var(--quiet); font-size: .88rem; }
svg { max-width: 100%; height: auto; }
@media (max-width: 40rem) { main { padding: 1.5rem 1rem 3rem; } h1 { font-size: 1.6rem; }
  .facts th, .facts td { display: block; width: auto; border: 0; padding: .1rem 0; }
  .facts tr { display: block; border-bottom: 1px solid var(--line); padding: .3rem 0; } }
@media print { @page { margin: 16mm; }
  :root { --ink: #000; --quiet: #444; --line: #bbb; --paper: #fff; --card: #fff; --pass: #17723a;
    --fail: #b3261e; }
  body { font-size: 10.5pt; } main { max-width: none; padding: 0; } h2 { break-after: avoid; }
  .wide { overflow: visible; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def page(title: str, body: str) -> str:
    """A page.

    Args:
        title: plain text.
        body: HTML; whoever makes it escapes what it holds.
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )
