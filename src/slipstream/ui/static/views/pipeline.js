// What each lane did in one or several steps, two runs under each other on one time axis.
// Touch this when a block should tell more.

import { change, useAddress } from "../address.js";
import { get, request } from "../api.js";
import { ticks, useWidth } from "../charts.js";
import { Busy, Choice, CopyRequest, Empty, html, milliseconds, Panel, Problem, Slider, useAnswer } from "../parts.js";
import { useState } from "../vendor/hooks.js";
import { NoRuns } from "./training.js";

const LANE = 26, LEFT = 78, BOTTOM = 24;
export const KINDS = [["compute", "compute"], ["lookup", "lookup in tables and buffers"], ["comm", "exchange"], ["input", "loading"]];

export default function Pipeline({ page }) {
  const address = useAddress();
  const runs = useAnswer((signal) => (page.runs ? get("/v1/runs", { signal }) : null), [page]);
  if (!page.runs) return html`<${NoRuns} page=${page} />`;
  if (runs.error && !runs.data) return html`<${Problem} error=${runs.error} retry=${runs.again} />`;
  if (!runs.data) return html`<${Busy} label="Reading the runs" />`;
  const traced = runs.data.runs.filter((row) => row.trace);
  if (!traced.length) {
    return html`<${Empty} title="No run here left a trace" command="slipstream train RECIPE train.schedule=nested">
      <p>A run that is trained by a schedule with lanes keeps what each lane did in its last steps.</p><//>`;
  }
  const named = traced.map((row) => row.run);
  const above = named.includes(address.above) ? address.above : named[named.length - 1];
  const below = address.below ?? named.find((name) => name !== above) ?? "";
  const steps = Number(address.steps ?? 1);
  const options = traced.map((row) => ({ value: row.run, label: `${row.run} (${row.schedule})` }));
  return html`
    <div class="controls">
      <${Choice} id="above" label="above" value=${above} options=${options} change=${(value) => change({ above: value })} />
      <${Choice} id="below" label="below" value=${below} options=${[{ value: "", label: "nothing" }, ...options]}
        change=${(value) => change({ below: value })} />
      <${Slider} id="steps" label="steps" min=${1} max=${10} value=${steps} shown=${String(steps)}
        change=${(value) => change({ steps: value })} />
    </div>
    <${Lanes} key=${`${above}|${below}|${steps}`} names=${[above, below].filter(Boolean)} steps=${steps} />`;
}

function Lanes({ names, steps }) {
  const path = (name) => `/v1/trace?run=${encodeURIComponent(name)}&steps=${steps}`;
  const found = useAnswer((signal) => Promise.all(names.map((name) => get(path(name), { signal }))), []);
  const [detail, setDetail] = useState(null);
  if (found.error) return html`<${Problem} error=${found.error} retry=${found.again} />`;
  if (!found.data) return html`<${Busy} label="Reading traces" />`;
  const span = Math.max(...found.data.map((trace) => trace.span_ms), 1e-3);
  return html`<div class="stack">
    ${found.data.map((trace) => html`<${Panel} key=${trace.run} id="trace-${trace.run}" title="${trace.run}, schedule ${trace.schedule}"
      aside=${html`<span class="muted">${told(trace)}</span>`}>
      <${Drawing} trace=${trace} span=${span} show=${setDetail} /><//>`)}
    <ul class="legend">${KINDS.map(([kind, name]) => html`<li key=${kind}><i class="swatch kind-${kind}"></i>${name}</li>`)}
      <li>lighter: every other step</li></ul>
    <p class="detail" role="status">${detail ? html`<b>${detail.stage}</b>, lane ${detail.lane}, step ${detail.step}, micro-batch ${detail.micro}:
      ${milliseconds(detail.end_ms - detail.begin_ms)}${detail.waited_for ? `, after waiting ${milliseconds(detail.waited_ms)} for ${detail.waited_for}` : ", without waiting"}.`
      : html`<span class="muted">Point at a block, or reach it with Tab and the arrow keys, to read what it is.</span>`}</p>
    <${CopyRequest} request=${request("GET", path(names[0]))} />
  </div>`;
}

export function told(trace) {
  if (trace.step_ms === null) return "";
  const { exposed_lookup: lookup, exposed_comm: comm, compute_utilisation: compute } = trace.shares;
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  return `step ${milliseconds(trace.step_ms)}, computing ${percent(compute)}, waiting for lookups ${percent(lookup)}, for exchange ${percent(comm)}`;
}

export function Drawing({ trace, span, show }) {
  const [box, width] = useWidth(320);
  const [at, setAt] = useState(0);
  const height = trace.lanes.length * LANE + BOTTOM;
  const X = (ms) => LEFT + (ms / span) * (width - LEFT - 8);
  const blocks = trace.blocks;
  const press = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(blocks.length - 1, at + step));
    setAt(next);
    show(blocks[next]);
    event.currentTarget.querySelector(`[data-place="${next}"]`)?.focus();
  };
  return html`<div ref=${box}><svg class="lanes" viewBox="0 0 ${width} ${height}" width=${width} height=${height} role="group"
      aria-label="Lanes of ${trace.run} over ${milliseconds(span)}" onKeyDown=${press} onPointerLeave=${() => show(null)}>
    ${ticks(0, span, Math.max(2, Math.floor(width / 120))).map((ms) => html`<g key=${ms}><line x1=${X(ms)} x2=${X(ms)} y1="0" y2=${height - BOTTOM} />
      <text x=${X(ms)} y=${height - 8} text-anchor="middle">${Math.round(ms * 100) / 100}</text></g>`)}
    <text x="0" y=${height - 8}>ms</text>
    ${trace.lanes.map((lane, row) => html`<text key=${lane} x="0" y=${row * LANE + 17}>${lane}</text>`)}
    ${blocks.map((block, place) => html`<rect key=${place} data-place=${place} class="block kind-${block.kind} ${block.step % 2 ? "" : "even"}"
      x=${X(block.begin_ms)} width=${Math.max(0.8, X(block.end_ms) - X(block.begin_ms))} y=${trace.lanes.indexOf(block.lane) * LANE + 3} height=${LANE - 7}
      tabindex=${place === at ? 0 : -1} role="img"
      aria-label="${block.stage} of step ${block.step}, micro-batch ${block.micro}, ${milliseconds(block.end_ms - block.begin_ms)}"
      onPointerEnter=${() => show(block)} onFocus=${() => { setAt(place); show(block); }} />`)}
  </svg></div>`;
}
