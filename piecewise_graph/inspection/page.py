"""A report as one HTML page that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from piecewise_graph.reasons import remedy

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5d6878; --line: #d9dee6; --back: #f7f8fa;
  --card: #fff; --bar: #4c7fd0; --warn: #b4540a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa5b5; --line: #333b47;
  --back: #14181e; --card: #1c222b; --bar: #5f92e6; --warn: #f0a35e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.5rem 4rem; background: var(--back);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .3rem; }
h3 { font-size: .95rem; margin: 1.6rem 0 .5rem; } p { margin: .3rem 0; color: var(--soft); }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .6rem 1rem;
  min-width: 8rem; } .card b { display: block; font-size: 1.35rem; } .card span { color: var(--soft); }
.row { display: flex; flex-wrap: wrap; gap: 3px; align-items: center; background: var(--card);
  border: 1px solid var(--line); border-radius: .6rem; padding: .8rem; }
.segment { background: hsl(var(--hue) 55% 50% / .28); border: 1px solid hsl(var(--hue) 55% 50% / .8);
  border-radius: .3rem; padding: .1rem .45rem; font-size: .8rem; }
.op { border: 1px dashed var(--soft); border-radius: 1rem; padding: 0 .5rem; font-size: .75rem;
  color: var(--soft); }
table { border-collapse: collapse; width: 100%; background: var(--card); border: 1px solid var(--line); }
th, td { text-align: left; padding: .35rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--soft); font-size: .85rem; } td.n { white-space: nowrap; }
.bar { display: inline-block; height: .65rem; margin-right: .5rem; border-radius: 2px;
  background: var(--bar); }
.warn { color: var(--warn); }
details { margin: .4rem 0; background: var(--card); border: 1px solid var(--line);
  border-radius: .4rem; } summary { cursor: pointer; padding: .4rem .8rem; }
pre { margin: 0; padding: .8rem; overflow-x: auto; max-height: 32rem; border-top: 1px solid var(--line);
  font: 12px/1.45 ui-monospace, monospace; } svg { width: 100%; height: 9rem; background: var(--card);
  border: 1px solid var(--line); border-radius: .4rem; } svg path { fill: var(--bar); fill-opacity: .25;
  stroke: var(--bar); vector-effect: non-scaling-stroke; }
"""


def page(report: Mapping[str, Any]) -> str:
    """The page of `Report.to_dict()`."""
    traces = report["traces"]
    fallbacks = sum(sum(each["fallbacks"].values()) for each in (*traces, report))
    cards = {
        "traces": len(traces),
        "segments": sum(trace["segments"] for trace in traces),
        "distinct structures": sum(trace["distinct"] for trace in traces),
        "buckets captured": sum(len(trace["buckets"]) for trace in traces),
        "replays": sum(bucket["replays"] for trace in traces for bucket in trace["buckets"]),
        "calls without a tape": fallbacks,
        "graph pool": _mib(report["pool_bytes"]),
        "owned buffers": _mib(report["buffer_bytes"]),
    }
    body = [
        "<h1>piecewise-graph: what became of the model</h1>",
        f'<div class="cards">{"".join(map(_card, cards.items()))}</div>',
        *(_trace(number, trace) for number, trace in enumerate(traces)),
        _fallbacks("Calls that reached no trace", report["fallbacks"]),
        _reasons("Buckets that the budget has no room for", report["over_budget"]),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    title = "<title>piecewise-graph report</title>"
    return f'<!doctype html><html lang="en"><head>{head}{title}<style>{_STYLE}</style></head>' + (
        f"<body>{''.join(body)}</body></html>\n"
    )


def _card(item: tuple[str, Any]) -> str:
    return f'<div class="card"><b>{escape(str(item[1]))}</b><span>{escape(item[0])}</span></div>'


def _trace(number: int, trace: Mapping[str, Any]) -> str:
    hues = {each["key"]: 47 * i % 360 for i, each in enumerate(trace["structures"])}
    parts = [f"<h2>Trace {number}: {escape(trace['sizes'])}</h2>"]
    if trace["blocked"]:
        why = f"{trace['blocked']}: {remedy(trace['blocked'])}"
        parts.append(f'<p class="warn">Never replayed: {escape(why)}</p>')
    if trace["layout"]:
        parts.append("<h3>The model as segments and splitting ops; one colour is one structure</h3>")
        parts.append(f'<div class="row">{"".join(_step(step, hues) for step in trace["layout"])}</div>')
    parts += [
        f'<p class="warn">Inside a segment, not registered: {escape(leak)}</p>' for leak in trace["leaks"]
    ]
    if trace["structures"]:
        parts.append("<h3>Structures, compiled once each, and their code</h3>")
        parts += [_structure(each, hues, trace["padding"]) for each in trace["structures"]]
    if trace["buckets"]:
        parts += ["<h3>Buckets</h3>", _buckets(trace["buckets"]), _memory(trace["buckets"])]
    parts.append(_reasons("Buckets whose capture failed", trace["failed"]))
    parts.append(_fallbacks("Calls without a tape", trace["fallbacks"]))
    return "".join(parts)


def _step(step: Mapping[str, Any], hues: Mapping[str, int]) -> str:
    title = escape(", ".join(step["ops"]))
    name = escape(step["name"])
    if not step["segment"]:
        return f'<span class="op" title="{title}">{name}</span>'
    return (
        f'<span class="segment" style="--hue: {hues.get(step["structure"], 0)}" title="{title}">{name}</span>'
    )


def _structure(each: Mapping[str, Any], hues: Mapping[str, int], padding: Mapping[str, str]) -> str:
    count = len(each["segments"])
    where = ", ".join(each["segments"][:4]) + (f" and {count - 4} more segments" if count > 4 else "")
    mark = f'<span class="segment" style="--hue: {hues[each["key"]]}">{escape(each["key"][:12])}</span>'
    made = f"{each['origin']} in {each['seconds']:.2f} s; runs {where}"
    fault = padding.get(each["key"])
    warn = f' <span class="warn">not padded: {escape(f"{fault}: {remedy(fault)}")}</span>' if fault else ""
    code = f"<pre>{escape(each['code'])}</pre>"
    return f"<details><summary>{mark} {escape(made)}{warn}</summary>{code}</details>"


def _buckets(buckets: Sequence[Mapping[str, Any]]) -> str:
    widest = {name: max(b[name] for b in buckets) or 1 for name in ("graph_bytes", "seconds", "replays")}

    def cell(bucket: Mapping[str, Any], name: str, text: str) -> str:
        width = 6 * bucket[name] / widest[name]
        return f'<td class="n"><span class="bar" style="width: {width:.2f}rem"></span>{text}</td>'

    lines = [
        f'<tr><td class="n">{b["tokens"]}</td><td>{escape(b["mode"])}</td><td>{b["graphs"]}</td>'
        + cell(b, "graph_bytes", _mib(b["graph_bytes"]))
        + cell(b, "seconds", f"{b['seconds'] * 1e3:.1f} ms")
        + cell(b, "replays", str(b["replays"]))
        + f"<td>{escape(', '.join(f'{n} x {why}' for why, n in b['unpadded'].items()))}</td></tr>"
        for b in buckets
    ]
    heads = "tokens", "mode", "graphs", "adds to the pool", "capture", "replays", "segments at the exact size"
    return _table(heads, lines)


def _memory(buckets: Sequence[Mapping[str, Any]]) -> str:
    """The pool's bytes after each capture, in the order of capture."""
    order = sorted(buckets, key=lambda bucket: (bucket["pool_bytes"], -bucket["tokens"]))
    highest, step = max(bucket["pool_bytes"] for bucket in order) or 1, 100 / len(order)
    points = [f"M0,100 L0,{100 - 90 * order[0]['pool_bytes'] / highest:.2f}"]
    for index, bucket in enumerate(order):
        y = 100 - 90 * bucket["pool_bytes"] / highest
        points.append(f"L{index * step:.2f},{y:.2f} L{(index + 1) * step:.2f},{y:.2f}")
    told = " &rarr; ".join(f"{bucket['tokens']}: {_mib(bucket['pool_bytes'])}" for bucket in order)
    drawn = f'<path d="{" ".join(points)} L100,100 Z"/>'
    return (
        "<h3>Memory of the graph pool over capture</h3>"
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img">{drawn}</svg><p>{told}</p>'
    )


def _fallbacks(title: str, fallbacks: Mapping[str, int]) -> str:
    lines = [
        f'<tr><td class="n">{escape(reason)}</td><td>{count}</td><td>{escape(remedy(reason))}</td></tr>'
        for reason, count in fallbacks.items()
    ]
    return f"<h3>{title}</h3>{_table(('reason', 'calls', 'what to do'), lines)}" if lines else ""


def _reasons(title: str, reasons: Mapping[Any, str]) -> str:
    lines = [
        f'<tr><td class="n">{size}</td><td>{escape(str(why))}</td></tr>' for size, why in reasons.items()
    ]
    return f"<h3>{title}</h3>{_table(('tokens', 'why'), lines)}" if lines else ""


def _table(heads: Iterable[str], lines: Sequence[str]) -> str:
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{''.join(lines)}</table>"


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"
