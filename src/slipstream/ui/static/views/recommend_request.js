// This request's timeline: what the instance did when, whether the relay helped, and what the same
// request takes without it. Touch this when a request tells more about itself.

import { request, send } from "../api.js";
import { html, milliseconds, Panel } from "../parts.js";
import { useEffect, useState } from "../vendor/hooks.js";

const HITS = {
  device: "found in the device cache",
  host: "reloaded from the host tier",
  joined: "joined the pre-inference under way",
  extended: "grew from a shorter prefix",
  inline: "computed in line",
  none: "nothing to compute",
};
const STAGES = {
  history: "history", prefill: "prefill", retrieve: "retrieve", prefix: "wait for the prefix", rank: "rank",
};
const QUIET_MS = 250; // after the last change, before the request is repeated without the relay

export function RequestPanel({ asked, found, model }) {
  const { data } = found;
  const plain = useWithoutRelay(asked, data);
  const timeline = data?.timeline;
  const aside = data && html`<span class="hit ${data.hit === "inline" ? "" : "relay"}">
    relay <i aria-hidden="true"></i> ${data.hit === "inline" ? "no" : "hit"}</span>`;
  return html`<${Panel} id="request-title" title="This request" aside=${aside} class="request">
    ${!data && html`<p class="muted">Nothing was asked yet.</p>`}
    ${timeline && html`<${Timeline} timeline=${timeline} />`}
    ${data && html`<dl class="facts">
      <div><dt>prefix</dt><dd>${HITS[data.hit] ?? data.hit}</dd></div>
      ${timeline && html`<div><dt>in the instance</dt><dd>${milliseconds(timeline.total_ms)}</dd></div>`}
      <div><dt>without the relay</dt><dd>${plain.error ? "–" : plain.ms ? milliseconds(plain.ms) : "measuring …"}</dd></div>
      <div><dt>from this page</dt><dd>${milliseconds(found.roundTrip)}</dd></div>
      <div><dt>instance</dt><dd>${data.instance}</dd></div>
      <div><dt>version</dt><dd title=${data.version}>${data.version.slice(0, 8)}</dd></div>
      <div><dt>behaviours read</dt><dd>${data.behaviours}${data.skipped ? `, ${data.skipped} unknown left out` : ""}</dd></div>
    </dl>`}
  <//>`;
}

function Timeline({ timeline }) {
  const whole = Math.max(timeline.total_ms, ...timeline.stages.map((each) => each.end_ms), 1e-6);
  return html`<table class="timeline"><caption class="hidden">Stages of this request</caption>
    <thead class="hidden"><tr><th>stage</th><th>when</th><th>time</th></tr></thead>
    <tbody>${timeline.stages.map((each, place) => html`<tr key=${place}>
      <th scope="row">${STAGES[each.name] ?? each.name}</th>
      <td><svg aria-hidden="true" preserveAspectRatio="none"><rect class="track" width="100%" height="100%" />
        <rect class="stage ${each.name}" x="${(100 * each.start_ms) / whole}%" height="100%"
          width="${Math.max(0.8, (100 * (each.end_ms - each.start_ms)) / whole)}%" /></svg></td>
      <td class="number">${milliseconds(each.end_ms - each.start_ms)}</td></tr>`)}</tbody></table>`;
}

// The same request computed in line, once the person pauses.
function useWithoutRelay(asked, data) {
  const [state, setState] = useState({});
  useEffect(() => {
    if (!data) return undefined;
    setState({});
    const controller = new AbortController();
    const timer = setTimeout(() => {
      const plain = request("POST", asked.path, { ...asked.body, relay: false });
      send(plain, { signal: controller.signal }).then(
        (answer) => setState({ ms: answer.timeline?.total_ms ?? null }),
        (error) => controller.signal.aborted || setState({ error }),
      );
    }, QUIET_MS);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [data]);
  return state;
}
