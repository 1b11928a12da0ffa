"""Look and behaviour of the page that `plait inspect --html` writes."""

COLOURS = {
    "embedding": "#56b4e9",
    "attention": "#0072b2",
    "MLP": "#e69f00",
    "experts": "#d55e00",
    "norms": "#8a8a8a",
    "head": "#009e73",
    "other": "#cc79a7",
}
"""Of each kind of parameters; told apart by people with any colour vision (Okabe and Ito)."""

CSS = """
:root { color-scheme: light dark; --ink: #1c1f23; --dim: #5d6670; --paper: #fbfbf9;
  --card: #ffffff; --line: #d9dcdf; --track: #eceef0; --q: #0072b2; --kv: #b04a8b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --dim: #9aa4ae; --paper: #15181b;
  --card: #1d2125; --line: #383f46; --track: #2a3036; --q: #4aa3dc; --kv: #d585b8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1500px; padding: 1.5rem 1rem 4rem; background: var(--paper);
  color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
p { margin: .3rem 0; max-width: 75ch; }
.dim, small { color: var(--dim); }
code { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: .8rem 0; font-size: 13px; }
.legend span { display: inline-flex; align-items: center; gap: .4rem; }
.key { width: 14px; height: 14px; border-radius: 3px; display: inline-block; flex: none; }
.whole { background-image: repeating-linear-gradient(45deg, transparent 0 3px,
  rgb(255 255 255 / .55) 3px 6px); }
.ranks { display: grid; grid-template-columns: max-content minmax(8rem, 1fr) max-content;
  gap: .35rem .8rem; align-items: center; max-width: 900px; }
.bar { display: flex; height: 18px; background: var(--track); border-radius: 4px;
  overflow: hidden; }
.bar i { display: block; height: 100%; min-width: 1px; }
.scroll { overflow-x: auto; }
.grid { display: grid; gap: 6px; min-width: min-content; }
.grid > .top { font-weight: 600; padding: 0 .6rem; }
.layer, .cell { background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .55rem .6rem; min-width: 0; }
.layer b { display: block; overflow-wrap: anywhere; font-size: 14px; }
.times { color: var(--dim); font-weight: normal; }
.cell .rank { display: none; }
.cell .bar { height: 12px; margin: .15rem 0; }
.size { font-size: 12px; color: var(--dim); }
.heads { display: flex; flex-wrap: wrap; gap: 5px; margin: .1rem 0 .5rem; }
.group { display: inline-flex; flex-direction: column; gap: 2px; max-width: 100%; }
.group > div { display: flex; flex-wrap: wrap; gap: 2px; }
.q, .kv { font: 10px/15px ui-monospace, monospace; text-align: center; color: #fff;
  border-radius: 3px; height: 15px; min-width: 15px; padding: 0 2px; }
.q { background: var(--q); }
.q.again { background: none; color: var(--dim); border: 1px dotted var(--dim); line-height: 13px; }
.kv { background: var(--kv); border-radius: 8px; }
.kv.shared { background: none; color: var(--kv); border: 1.5px dashed var(--kv);
  line-height: 12px; }
.calls { font-size: 12px; color: var(--dim); margin-top: .3rem; }
.calls div { display: flex; gap: .4rem; }
.calls span:first-child { flex: none; width: 1em; }
table { border-collapse: collapse; font-size: 13px; }
td, th { text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0;
  border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 500; }
td.n, th.n { text-align: right; white-space: nowrap; }
#tip { position: fixed; z-index: 9; pointer-events: none; background: var(--ink);
  color: var(--paper); padding: .3rem .55rem; border-radius: 5px; font-size: 12.5px;
  max-width: 22rem; white-space: pre-line; display: none; }
[data-tip] { cursor: help; }
@media (max-width: 720px) {
  .grid { grid-template-columns: 1fr !important; }
  .grid > .top { display: none; }
  .layer { margin-top: .8rem; }
  .cell .rank { display: block; font-size: 12px; font-weight: 600; }
}
@media print { .layer, .cell { break-inside: avoid; } }
"""

SCRIPT = """
const tip = document.getElementById("tip");
function show(event) {
  const from = event.target.closest("[data-tip]");
  tip.style.display = from ? "block" : "none";
  if (!from) return;
  tip.textContent = from.dataset.tip;
  const box = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, innerWidth - box.width - 8);
  const below = event.clientY + 18;
  tip.style.left = Math.max(x, 4) + "px";
  tip.style.top = (below + box.height > innerHeight ? event.clientY - box.height - 10 : below)
    + "px";
}
addEventListener("mousemove", show);
addEventListener("click", show);
"""
