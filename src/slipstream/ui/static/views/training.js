// Runs, past and under way: a table, curves over each other, what differs in their recipes.
// Touch this when a run should show more.

import { change, useAddress } from "../address.js";
import { get, request } from "../api.js";
import { LineChart } from "../charts.js";
import { age, Busy, Choice, CopyRequest, count, Empty, html, Panel, Problem, score, useRepeatedly } from "../parts.js";
import { useEffect, useState } from "../vendor/hooks.js";

const POLL_SECONDS = 3;
const MOST_CHOSEN = 6;
const FIRST = ["HR@10", "NDCG@10", "AUC"];
const CHARTS = [
  { id: "quality", title: "Validation", unit: "share", names: FIRST.map((name) => `validation ${name}`) },
  { id: "loss", title: "Loss", unit: "per supervised token", names: ["loss"] },
  { id: "speed", title: "Speed", unit: "tokens per second", names: ["tokens_per_second"] },
  { id: "mfu", title: "MFU", unit: "share of the matmul peak", names: ["mfu"] },
  { id: "exposed", title: "Exposed", unit: "share of a step", names: ["exposed_lookup", "exposed_comm"] },
];

export function NoRuns({ page }) {
  const words = page.models.length ? "slipstream ui http://127.0.0.1:8000 runs" : "slipstream ui runs";
  return html`<${Empty} title="No directory of runs is shown here" command=${words}>
    <p>Training runs are files of the machine that trained them. Start the page with their directory, beside
    the address of a server if there is one:</p><//>`;
}

export default function Training({ page }) {
  const address = useAddress();
  const [runs, setRuns] = useState(null);
  const [error, setError] = useState(null);
  const read = () => get("/v1/runs").then((found) => { setRuns(found); setError(null); }, setError);
  useRepeatedly(async () => page.runs && read(), POLL_SECONDS, [page]);
  if (!page.runs) return html`<${NoRuns} page=${page} />`;
  if (!runs) return error ? html`<${Problem} error=${error} retry=${read} />` : html`<${Busy} label="Reading the runs" />`;
  if (!runs.runs.length) {
    return html`<${Empty} title="No run in ${runs.directory} yet" command="slipstream train retrieval-default data=DIR">
      <p>This page shows a run as soon as it begins.</p><//>`;
  }
  const names = runs.runs.map((row) => row.run);
  const chosen = (address.runs ? address.runs.split("|") : names.slice(0, 2)).filter((name) => names.includes(name));
  const toggle = (name) => {
    const next = chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name].slice(-MOST_CHOSEN);
    change({ runs: next.join("|") || null });
  };
  return html`
    ${error && html`<${Problem} error=${error} retry=${read} />`}
    <${Panel} id="runs-title" title="Runs" aside=${html`<span class="muted">${runs.directory}</span>`}>
      <${RunTable} rows=${runs.runs} chosen=${chosen} toggle=${toggle} />
      <${CopyRequest} request=${request("GET", "/v1/runs")} />
    <//>
    ${chosen.length
      ? html`<${Curves} chosen=${chosen} rows=${runs.runs} />`
      : html`<${Empty} title="Choose a run to see its curves" />`}`;
}

function RunTable({ rows, chosen, toggle }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Runs"><table class="list">
    <thead><tr><th>shown</th><th>run</th><th>data</th><th>model</th><th>schedule</th><th>status</th><th class="number">step</th>
      <th class="number">best validation</th><th class="number">test</th><th class="number">tokens/s</th><th class="number">MFU</th>
      <th class="number">exposed</th><th class="number">age</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.run}>
      <td><input type="checkbox" aria-label="Show ${row.run}" checked=${chosen.includes(row.run)} onChange=${() => toggle(row.run)} /></td>
      <td>${row.run}</td><td>${row.data}</td><td>${row.model}</td><td>${row.schedule || "synchronous"}</td>
      <td>${row.status === "running" ? html`<b class="truth">● running</b>` : row.status}</td>
      <td class="number">${count(row.step)}</td><td class="number">${best(row.validation)}</td><td class="number">${best(row.test)}</td>
      <td class="number">${row.tokens_per_second === null ? "–" : count(Math.round(row.tokens_per_second))}</td>
      <td class="number">${percent(row.mfu)}</td><td class="number">${percent(row.exposed)}</td>
      <td class="number">${age(row.age_seconds)}</td></tr>`)}</tbody></table></div>`;
}

const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);

function best(figures) {
  const name = FIRST.find((each) => each in figures);
  return name ? `${name} ${score(figures[name])}` : "–";
}

// What the chosen runs recorded; read again while one is under way.
function Curves({ chosen, rows }) {
  const [found, setFound] = useState({});
  const [error, setError] = useState(null);
  const [figure, setFigure] = useState("");
  const live = rows.some((row) => chosen.includes(row.run) && row.status === "running");
  const steps = rows.filter((row) => chosen.includes(row.run)).map((row) => row.step).join();
  useEffect(() => {
    let gone = false;
    Promise.all(chosen.map((name) => get(`/v1/run?run=${encodeURIComponent(name)}`))).then(
      (answers) => gone || setFound(Object.fromEntries(answers.map((each) => [each.row.run, each]))),
      (problem) => gone || setError(problem),
    );
    return () => (gone = true);
  }, [chosen.join("|"), live ? steps : ""]);
  const shown = chosen.filter((name) => found[name]).map((name) => found[name]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!shown.length) return html`<${Busy} label="Reading curves" />`;
  const all = [...new Set(shown.flatMap((run) => Object.keys(run.curves)))].sort();
  const drawn = CHARTS.filter((chart) => chart.names.some((name) => all.includes(name)));
  return html`<div class="charts">
      ${drawn.map((chart) => html`<${Panel} key=${chart.id}><${LineChart} title=${chart.title} unit=${chart.unit} xLabel="step"
        series=${seriesOf(shown, chart.names.filter((name) => all.includes(name)).slice(0, chart.id === "quality" ? 1 : 2))} /><//>`)}
      <${Panel}><${Choice} id="figure" label="another figure" value=${figure} change=${setFigure}
          options=${[{ value: "", label: "choose" }, ...all.map((name) => ({ value: name, label: name }))]} />
        ${figure && html`<${LineChart} title=${figure} unit="" xLabel="step" series=${seriesOf(shown, [figure])} />`}<//>
    </div>
    ${shown.length > 1 && html`<${Differences} shown=${shown} />`}
    <${CopyRequest} request=${request("GET", `/v1/run?run=${encodeURIComponent(chosen[0])}`)} />`;
}

function seriesOf(shown, names) {
  return shown.flatMap((run) => names.filter((name) => run.curves[name]).map((name) => ({
    name: names.length > 1 ? `${run.row.run} ${name}` : `${run.row.run} ${name.startsWith("validation ") ? name.slice(11) : ""}`,
    points: run.curves[name],
  })));
}

function Differences({ shown }) {
  const keys = [...new Set(shown.flatMap((run) => Object.keys(run.recipe_keys)))];
  const different = keys.filter((key) => new Set(shown.map((run) => run.recipe_keys[key])).size > 1);
  return html`<${Panel} id="differences-title" title="What differs in their recipes" class="why">
    ${different.length
      ? html`<div class="scroll" tabindex="0" role="region" aria-label="Differences"><table class="list">
        <thead><tr><th>key</th>${shown.map((run) => html`<th key=${run.row.run}>${run.row.run}</th>`)}</tr></thead>
        <tbody>${different.map((key) => html`<tr key=${key}><td><code>${key}</code></td>
          ${shown.map((run) => html`<td key=${run.row.run} class="wrap">${run.recipe_keys[key] ?? "–"}</td>`)}</tr>`)}</tbody></table></div>`
      : html`<p class="muted">Nothing: the same recipe.</p>`}
  <//>`;
}
