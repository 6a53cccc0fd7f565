"""Colours and layout. All colours are variables, so that dark is the same page with other values."""

STYLE = """
:root { color-scheme: light dark; --bg: #ffffff; --panel: #f6f7f9; --ink: #1b1f24; --dim: #5b6570; --rule: #d5dae0;
  --bad: #c8102e; --bad-ink: #ffffff; --ok: #1a7f37; --warn: #9a6700; --link: #0b57d0; --idle: #e9ecf0;
  --forward: #3b7dd8; --backward: #8e5bd0; --node: #b58ae6; --optimizer: #2f9e6e; --data: #1fa3b5;
  --checkpoint: #c98a1b; --wait: #b9c0c8;
  --h-3: #2166ac; --h-2: #67a9cf; --h-1: #d1e5f0; --h0: #f2f2f2; --h1: #fddbc7; --h2: #ef8a62; --h3: #b2182b; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --panel: #1d2126; --ink: #e6e9ec; --dim: #9aa5b1;
  --rule: #363d45; --bad: #ff5a6e; --bad-ink: #14171a; --ok: #57c878; --warn: #e3b341; --link: #8ab4f8; --idle: #262c33;
  --forward: #6aa3f0; --backward: #a97fe6; --node: #7d5ab0; --optimizer: #4fbf8d; --data: #45c0d0;
  --checkpoint: #e0ab4a; --wait: #4a535d;
  --h-3: #5aa0e0; --h-2: #3c6f9e; --h-1: #2a4257; --h0: #2b2f34; --h1: #5a3a2e; --h2: #b35a38; --h3: #ff6b57; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 20px 24px 60px; }
h1 { font-size: 22px; line-height: 1.3; margin: 6px 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 8px; }
h2 small { font-weight: normal; color: var(--dim); font-size: 13px; margin-left: 8px; }
p { margin: 6px 0; max-width: 90ch; }
a { color: var(--link); }
code, td.name, .tree { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 13px; }
.skip { position: absolute; left: -9999px; }
.skip:focus { position: static; }
nav { font-size: 13px; color: var(--dim); display: flex; flex-wrap: wrap; gap: 4px 14px; }
.kind { display: inline-block; padding: 2px 10px; border-radius: 4px; background: var(--bad); color: var(--bad-ink);
  font-weight: 600; font-size: 13px; }
.kind.healthy { background: var(--ok); color: var(--bg); }
.kind.unknown { background: var(--warn); color: var(--bg); }
.dim { color: var(--dim); }
.cards { display: flex; flex-wrap: wrap; gap: 12px; }
.card { background: var(--panel); border: 1px solid var(--rule); border-left: 4px solid var(--bad); border-radius: 4px;
  padding: 10px 14px; min-width: 260px; max-width: 100%; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 12px; margin: 0; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; }
ul { margin: 6px 0; padding-left: 20px; } li { overflow-wrap: anywhere; }
.scroll { overflow: auto; background: var(--panel); border: 1px solid var(--rule); border-radius: 4px; padding: 8px; }
.tall { max-height: 560px; }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
summary { cursor: pointer; }
table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--dim); font-weight: 600; } td.number, th.number { text-align: right; }
tr.bad td { color: var(--bad); }
.tree ul { list-style: none; padding-left: 18px; margin: 0; border-left: 1px solid var(--rule); }
.tree li { padding: 1px 0; }
.tree > ul { border: 0; padding-left: 0; }
.tree .here > .at, .chip { display: inline-block; border-radius: 3px; padding: 0 7px; margin-left: 6px; font-size: 12px;
  background: var(--idle); color: var(--ink); }
.tree .here > .at.bad, .chip.bad { background: var(--bad); color: var(--bad-ink); }
.legend { font-size: 12px; color: var(--dim); display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 6px 0; }
.legend svg { width: 12px; height: 12px; vertical-align: -1px; margin-right: 4px; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg text.dim { fill: var(--dim); font-size: 11px; }
svg text.bad { fill: var(--bad); font-weight: 600; } svg text.inside { fill: var(--bg); font-size: 10px; }
svg text.mono { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 11px; }
.idle { fill: var(--idle); } .forward { fill: var(--forward); } .backward { fill: var(--backward); }
.node { fill: var(--node); } .optimizer { fill: var(--optimizer); } .data { fill: var(--data); }
.checkpoint { fill: var(--checkpoint); } .wait { fill: var(--wait); } .stands { fill: var(--bad); }
.gone { stroke: var(--ink); stroke-width: 2; }
.axis { stroke: var(--rule); stroke-width: 1; } .fault { stroke: var(--bad); stroke-width: 1; stroke-dasharray: 3 3; }
.box { fill: var(--bg); stroke: var(--dim); } .box.bad { stroke: var(--bad); stroke-width: 2.5; }
.arrow { stroke: var(--dim); stroke-width: 1.5; fill: none; marker-end: url(#head); } #head path { fill: var(--dim); }
.median { stroke: var(--forward); stroke-width: 2; fill: none; } .band { fill: var(--forward); opacity: 0.18; }
.late { stroke: var(--bad); stroke-width: 2; fill: none; }
.own { stroke: var(--optimizer); stroke-width: 2; fill: none; stroke-dasharray: 5 3; }
.c-3 { fill: var(--h-3); } .c-2 { fill: var(--h-2); } .c-1 { fill: var(--h-1); } .c0 { fill: var(--h0); }
.c1 { fill: var(--h1); } .c2 { fill: var(--h2); } .c3 { fill: var(--h3); }
footer { margin-top: 40px; font-size: 12px; color: var(--dim); }
@media print { .tall { max-height: none; } }
"""
