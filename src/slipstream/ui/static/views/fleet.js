// The instances of the model: state, load, caches, hits, times; drain and kill, and see them recover.
// Touch this when an instance should tell more.

import { post, request, send } from "../api.js";
import { Sparkline } from "../charts.js";
import { Bar, Busy, bytes, Careful, CopyRequest, count, Empty, html, milliseconds, Panel, Problem, useRepeatedly } from "../parts.js";
import { useRef, useState } from "../vendor/hooks.js";

const POLL_SECONDS = 1;
const REMEMBERED = 120; // polls in a sparkline
const HITS = ["device", "joined", "extended", "host", "inline"];

export default function Fleet({ model }) {
  const [fleet, setFleet] = useState(null);
  const [error, setError] = useState(null);
  const [told, setTold] = useState([]);
  const past = useRef(new Map());
  const states = useRef(new Map());
  const asked = request("GET", "/v1/fleet", undefined, model?.base ?? "");

  const tell = (sentence) =>
    setTold((before) => [{ at: new Date().toLocaleTimeString(), sentence }, ...before].slice(0, 12));
  const read = async () => {
    if (!model) return;
    try {
      const found = await send(asked);
      for (const each of found.instances) {
        const list = past.current.get(each.name) ?? [];
        past.current.set(each.name, [...list, each.p99_ms ?? NaN].slice(-REMEMBERED));
        const before = states.current.get(each.name);
        if (before && before.state !== each.state) tell(`${each.name}: ${before.state} → ${each.state}`);
        // A process may be replaced between two polls.
        if (before?.started_at && each.started_at && before.started_at !== each.started_at) tell(`${each.name}: started again`);
        states.current.set(each.name, each);
      }
      setFleet(found);
      setError(null);
    } catch (problem) {
      setError(problem);
    }
  };
  useRepeatedly(read, POLL_SECONDS, [model]);
  const act = (path, name) => async () => {
    try {
      await post(path, { instance: name }, {}, model.base);
      tell(`${name}: ${path === "/admin/kill" ? "killed" : "asked to drain"}`);
      await read();
    } catch (problem) {
      tell(`${name}: ${problem.message}`);
    }
  };

  if (!model) return html`<${Empty} title="No model is served here" command="slipstream ui BUNDLE" />`;
  if (!fleet) return error ? html`<${Problem} error=${error} retry=${read} />` : html`<${Busy} label="Asking the fleet" />`;
  const total = fleet.instances.length;
  const ready = fleet.instances.filter((each) => each.state === "ready").length;
  return html`
    ${error && html`<${Problem} error=${error} />`}
    <${Panel} id="fleet-title" title="Instances" aside=${html`<span class="muted">${ready} of ${total} ready · figures of the last minute</span>`}>
      <div class="scroll" tabindex="0" role="region" aria-label="Instances"><table class="list">
        <thead><tr><th>instance</th><th>state</th><th class="number">load</th><th class="number">backlog</th><th>device cache</th><th>host tier</th>
          <th>hits by kind</th><th class="number">requests</th><th class="number">p50</th><th class="number">p99</th><th>p99 so far</th><th>act</th></tr></thead>
        <tbody>${fleet.instances.map((each) => html`<${Row} key=${each.name} each=${each} past=${past.current.get(each.name) ?? []}
          mayKill=${fleet.may_kill} act=${act} />`)}</tbody>
      </table></div>
      <${CopyRequest} request=${asked} />
    <//>
    <div class="two">
      <${Panel} id="refused-title" title="Refusals and answers">
        <${Counts} title="answers by status" counts=${fleet.answers} />
        <${Counts} title="refusals by reason" counts=${fleet.refusals} kind="warn" none="Nothing was refused." />
        <${Counts} title="pre-inferences not admitted, by reason" counts=${summed(fleet, "preinfer_refused")} none="None." />
        <${Counts} title="rankings refused for overload" counts=${summed(fleet, "overloaded")} kind="warn" none="None." />
      <//>
      <${Panel} id="told-title" title="What happened here">
        ${told.length
          ? html`<ol class="rows" aria-live="polite">${told.map((each, place) => html`<li key=${place}><small>${each.at}</small><span>${each.sentence}</span></li>`)}</ol>`
          : html`<p class="muted">Changes of state appear here. ${fleet.may_kill ? "Kill an instance to see it recover: its supervisor starts it again, and it finds its prefixes in the host tier."
              : html`Start the server with <code>--allow-kill</code> to kill an instance and see it recover.`}</p>`}
      <//>
    </div>`;
}

const STATE_WORDS = { ready: "good", draining: "warn", ejected: "warn", down: "bad" };

function Row({ each, past, mayKill, act }) {
  const hits = HITS.map((kind) => [kind, each.hits[kind] ?? 0]);
  const sum = hits.reduce((all, [, number]) => all + number, 0);
  return html`<tr>
    <td>${each.name}</td>
    <td><span class="state ${STATE_WORDS[each.state] ?? ""}"><i aria-hidden="true"></i>${each.state}</span></td>
    <td class="number">${count(each.outstanding)}</td><td class="number">${count(each.backlog)}</td>
    <td><${Tier} tier=${each.device} /></td>
    <td>${each.host ? html`<${Tier} tier=${each.host} />` : html`<span class="muted">none</span>`}</td>
    <td>${sum ? html`<${HitBar} hits=${hits} sum=${sum} />` : html`<span class="muted">none yet</span>`}</td>
    <td class="number">${count(each.requests)}</td>
    <td class="number">${milliseconds(each.p50_ms)}</td><td class="number">${milliseconds(each.p99_ms)}</td>
    <td><${Sparkline} values=${past} label="p99 of ${each.name}, now ${milliseconds(each.p99_ms)}" /></td>
    <td><span class="tools"><${Careful} label="drain" sure="drain ${each.name}?" disabled=${each.state !== "ready"} act=${act("/admin/drain", each.name)} />
      ${mayKill && html`<${Careful} label="kill" sure="kill ${each.name}?" disabled=${each.state === "down"} act=${act("/admin/kill", each.name)} />`}</span></td>
  </tr>`;
}

function Tier({ tier }) {
  return html`<span class="tier"><${Bar} share=${tier.used / Math.max(tier.budget, 1)} kind="relay" />
    <small>${bytes(tier.used)} of ${bytes(tier.budget)}, ${count(tier.entries)} prefixes</small></span>`;
}

function HitBar({ hits, sum }) {
  let at = 0;
  const words = hits.filter(([, number]) => number).map(([kind, number]) => `${kind} ${count(number)}`).join(", ");
  return html`<span class="tier"><svg class="hits" role="img" aria-label=${words} preserveAspectRatio="none">
    ${hits.map(([kind, number], place) => {
      const x = at;
      at += (100 * number) / sum;
      return html`<rect key=${kind} class="h${place}" x="${x}%" width="${(100 * number) / sum}%" height="100%" />`;
    })}</svg><small>${words}</small></span>`;
}

function Counts({ title, counts, kind = "", none = "None yet." }) {
  const rows = Object.entries(counts).sort((one, other) => other[1] - one[1]);
  const most = Math.max(...rows.map(([, number]) => number), 1);
  return html`<h3 class="counts">${title}</h3>
    ${rows.length ? html`<dl class="facts">${rows.map(([name, number]) => html`<div key=${name}><dt>${name.replaceAll("_", " ")}</dt>
      <dd><${Bar} share=${number / most} kind=${kind} /> ${count(number)}</dd></div>`)}</dl>`
      : html`<p class="muted">${none}</p>`}`;
}

function summed(fleet, field) {
  const all = {};
  for (const each of fleet.instances) {
    for (const [name, number] of Object.entries(each[field])) all[name] = (all[name] ?? 0) + number;
  }
  return all;
}
