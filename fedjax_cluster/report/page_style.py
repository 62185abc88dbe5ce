"""How pages look: one column up to 1 120 pixels, light or dark as the reader's system is."""

CSS = """\
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5a646e; --line: #dde2e7; --ground: #ffffff;
  --raised: #f5f7f9; --accent: #00629b; --warn: #8a2c00; --warn-ground: #fdf0e8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #a2adb8; --line: #363d45; --ground: #15181c;
  --raised: #1f242a; --accent: #6cb8ea; --warn: #ffb48a; --warn-ground: #3a2216; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 3rem; max-width: 72.5rem; color: var(--ink); background: var(--ground);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
h1 { margin: 0; font-size: 1.75rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.25rem 0 .75rem; padding-top: .5rem; font-size: 1.25rem; border-top: 1px solid var(--line); }
h3 { margin: 1.25rem 0 .5rem; font-size: 1rem; }
p { margin: .5rem 0; max-width: 48rem; overflow-wrap: anywhere; }
a { color: var(--accent); }
.lead { font-size: 1.1rem; }
.note, small, figcaption, footer { color: var(--soft); font-size: .875rem; }
.warning { padding: .6rem .9rem; border-left: 4px solid var(--warn); color: var(--warn);
  background: var(--warn-ground); }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; margin: 1.25rem 0 0; font-size: .9375rem; }
nav a { text-decoration: none; }
nav a:hover { text-decoration: underline; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin-top: 1rem; }
.card { display: flex; flex-direction: column; padding: .7rem .9rem; border-radius: 8px; background: var(--raised); }
.card span { color: var(--soft); font-size: .875rem; }
.card b { font-size: 1.4rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .9375rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 500; }
td { min-width: 2.5rem; }
.number { text-align: right; white-space: nowrap; }
.shares th, .shares td { vertical-align: middle; }
.shares td { min-width: 2.6rem; padding: .15rem .3rem; text-align: right; }
.share { display: block; padding: .15rem .4rem; border-radius: 4px;
  background: rgb(0 114 178 / calc(.08 + .6 * var(--share))); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.5rem 1.75rem;
  align-items: start; margin: .75rem 0; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 1.75rem; }
.columns > * { min-width: 0; }
figure { margin: 0; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
img { display: block; max-width: 100%; height: auto; padding: .5rem; border-radius: 8px; background: #ffffff; }
figcaption { margin-top: .4rem; max-width: 48rem; }
figcaption strong { color: var(--ink); }
details { margin: .75rem 0; }
summary { cursor: pointer; color: var(--accent); }
code { padding: .1em .3em; border-radius: 4px; background: var(--raised); font-size: .9em; overflow-wrap: anywhere; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); }
@media (max-width: 40rem) { body { padding: 1rem .9rem 2rem; } h1 { font-size: 1.4rem; } .card b { font-size: 1.2rem; }
  .cards { grid-template-columns: repeat(2, 1fr); }
  .wide .picture { overflow-x: auto; }
  .wide img { width: 38rem; max-width: none; } }
@media print { nav { display: none; } figure, .card { break-inside: avoid; } }
"""
