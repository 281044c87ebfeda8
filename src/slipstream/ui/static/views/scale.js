// A cluster that is not here: sliders, and what the simulator says of schedules on it.
// Touch this when the simulation gets another slider.

import { change, useAddress } from "../address.js";
import { request, send } from "../api.js";
import { Busy, Choice, Command, CopyRequest, count, Empty, html, milliseconds, Panel, Problem, Slider, useAnswer } from "../parts.js";
import { useState } from "../vendor/hooks.js";
import { Drawing, KINDS } from "./pipeline.js";

const WORKERS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
const NETWORKS = [0.5, 1, 2, 5, 12.5, 25, 50, 100];
const SAMPLES = [8, 16, 32, 64, 128, 256];
const SCHEDULES = ["nested", "dual_buffer", "frozen_window", "semi_async", "six_stage"];
const DEADLINE_MS = 30000;

const nearest = (list, value, standard) => Math.max(0, list.indexOf(list.includes(Number(value)) ? Number(value) : standard));

export default function Scale({ page }) {
  const address = useAddress();
  const workers = nearest(WORKERS, address.workers, 64);
  const network = nearest(NETWORKS, address.network, 12.5);
  const samples = nearest(SAMPLES, address.samples, 64);
  const schedule = SCHEDULES.includes(address.schedule) ? address.schedule : "nested";
  const question = request("POST", "/v1/simulate", {
    workers: WORKERS[workers], network_gb_per_s: NETWORKS[network], samples: SAMPLES[samples], schedules: ["serial", schedule],
  });
  const found = useAnswer(
    (signal) => (page.simulation ? send(question, { signal, deadline: DEADLINE_MS }) : null),
    [workers, network, samples, schedule, page],
  );
  if (!page.simulation) {
    return html`<${Empty} title="The simulator is not part of this server" command="slipstream ui http://127.0.0.1:8000 runs">
      <p>It computes for a while, so it runs beside the page and not in the router:</p><//>`;
  }
  return html`
    <div class="controls">
      <${Slider} id="workers" label="workers" min=${0} max=${WORKERS.length - 1} value=${workers} shown=${count(WORKERS[workers])}
        change=${(place) => change({ workers: WORKERS[place] })} />
      <${Slider} id="network" label="network" min=${0} max=${NETWORKS.length - 1} value=${network} shown="${NETWORKS[network]} GB/s"
        change=${(place) => change({ network: NETWORKS[place] })} />
      <${Slider} id="samples" label="batch of a worker" min=${0} max=${SAMPLES.length - 1} value=${samples} shown=${count(SAMPLES[samples])}
        change=${(place) => change({ samples: SAMPLES[place] })} />
      <${Choice} id="schedule" label="schedule" value=${schedule} options=${SCHEDULES.map((each) => ({ value: each, label: each }))}
        change=${(value) => change({ schedule: value })} />
    </div>
    ${found.error && html`<${Problem} error=${found.error} retry=${found.again} />`}
    ${!found.data && !found.error && html`<${Busy} label="Simulating" />`}
    ${found.data && html`<${Answer} answer=${found.data} busy=${found.busy} />`}
    <${CopyRequest} request=${question} />`;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

function Answer({ answer, busy }) {
  const [detail, setDetail] = useState(null);
  const span = Math.max(...answer.rows.map((row) => row.timeline.span_ms), 1e-6);
  const [plain, other] = answer.rows;
  return html`<div class="stack ${busy ? "stale-rows" : ""}">
    <${Panel} id="scale-title" title="Simulated" aside=${html`<span class="muted">global batch ${count(answer.global_batch)} · 8 accelerators a node, HSTU 512 wide, 8 blocks</span>`}>
      <div class="scroll" tabindex="0" role="region" aria-label="Schedules"><table class="list">
        <thead><tr><th>schedule</th><th class="number">step</th><th class="number">samples/s</th><th class="number">efficiency</th>
          <th class="number">computing</th><th class="number">waits for lookups</th><th class="number">for exchange</th><th class="number">imbalance</th><th>bound by</th></tr></thead>
        <tbody>${answer.rows.map((row) => html`<tr key=${row.schedule}><td>${row.schedule}</td>
          <td class="number">${milliseconds(row.step_ms)}</td><td class="number">${count(Math.round(row.samples_per_second))}</td>
          <td class="number">${percent(row.efficiency)}</td><td class="number">${percent(row.compute_utilisation)}</td>
          <td class="number">${percent(row.exposed_lookup)}</td><td class="number">${percent(row.exposed_comm)}</td>
          <td class="number">${percent(row.imbalance)}</td><td>${row.bound}</td></tr>`)}</tbody></table></div>
      ${other && html`<p class="muted">${other.schedule} is ${(plain.step_ms / other.step_ms).toFixed(2)} times as fast as doing one thing after the other. Efficiency: per worker, against one node.</p>`}
      <${Command} text=${answer.command} />
    <//>
    ${answer.rows.map((row) => html`<${Panel} key=${row.schedule} id="lanes-${row.schedule}" title="One step, ${row.schedule}">
      <${Drawing} trace=${row.timeline} span=${span} show=${setDetail} /><//>`)}
    <ul class="legend">${KINDS.map(([kind, name]) => html`<li key=${kind}><i class="swatch kind-${kind}"></i>${name}</li>`)}</ul>
    <p class="detail" role="status">${detail && html`<b>${detail.stage}</b>, step ${detail.step}, micro-batch ${detail.micro}: ${milliseconds(detail.end_ms - detail.begin_ms)}.`}</p>
  </div>`;
}
