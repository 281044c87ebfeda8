// Quality by groups: history length, popularity of what came next. A bar leads to people of its group.
// Touch this when a group should show more.

import { change, follow, useAddress, viewLink } from "../address.js";
import { get, request } from "../api.js";
import { Busy, Choice, CopyRequest, count, Empty, html, Panel, Problem, score, useAnswer } from "../parts.js";
import { NoRuns } from "./training.js";

const WORDS = {
  "history length": { title: "By length of the history", unit: "behaviours known" },
  "target popularity": { title: "By popularity of what came next", unit: "times in training" },
};
const SHARES = { cold_users: "held-out behaviours of users the model never saw", cold_items: "of items it never saw", repeats: "that repeat an earlier item" };

export default function Slices({ page }) {
  const address = useAddress();
  const runs = useAnswer((signal) => (page.runs ? get("/v1/runs", { signal }) : null), [page]);
  if (!page.runs) return html`<${NoRuns} page=${page} />`;
  if (runs.error && !runs.data) return html`<${Problem} error=${runs.error} retry=${runs.again} />`;
  if (!runs.data) return html`<${Busy} label="Reading the runs" />`;
  const evaluated = runs.data.runs.filter((row) => row.slices);
  if (!evaluated.length) {
    return html`<${Empty} title="No run here was evaluated" command="slipstream evaluate RUN">
      <p>An evaluation leaves the quality of every group in the run.</p><//>`;
  }
  const chosen = evaluated.some((row) => row.run === address.run) ? address.run : evaluated[0].run;
  return html`<${Run} key=${chosen} name=${chosen} evaluated=${evaluated} page=${page} figure=${address.figure} />`;
}

function Run({ name, evaluated, page, figure: asked }) {
  const path = `/v1/run?run=${encodeURIComponent(name)}`;
  const found = useAnswer((signal) => get(path, { signal }), []);
  const choices = html`<${Choice} id="run" label="run" value=${name} change=${(run) => change({ run })}
    options=${evaluated.map((row) => ({ value: row.run, label: row.run }))} />`;
  if (found.error) return html`<div class="controls">${choices}</div><${Problem} error=${found.error} retry=${found.again} />`;
  if (!found.data) return html`<${Busy} label="Reading the slices" />`;
  const { slices, row } = found.data;
  const figures = Object.keys(slices[0]?.figures ?? {});
  const figure = figures.includes(asked) ? asked : figures[0];
  const groups = [...new Set(slices.map((each) => each.by))];
  const most = Math.max(...slices.map((each) => each.figures[figure] ?? 0), 1e-9);
  return html`
    <div class="controls">${choices}
      <${Choice} id="figure" label="figure" value=${figure} change=${(value) => change({ figure: value })}
        options=${figures.map((each) => ({ value: each, label: each }))} /></div>
    <p class="muted">Test, all users: ${figure} ${score(row.test[figure])}${row.test[`popularity ${figure}`] !== undefined
      ? `; recommending what is popular would reach ${score(row.test[`popularity ${figure}`])}` : ""}.
      ${Object.entries(SHARES).filter(([key]) => row.test[key] !== undefined).map(([key, words]) => ` ${(100 * row.test[key]).toFixed(1)} % ${words}.`)}</p>
    <div class="two">${groups.map((by) => html`<${Panel} key=${by} id="slice-${by.replaceAll(" ", "-")}" title=${WORDS[by]?.title ?? by}
      aside=${html`<span class="muted">${WORDS[by]?.unit ?? ""} · ${figure}</span>`}>
      <div class="groups">${slices.filter((each) => each.by === by).map((each) => html`<${Group} key=${each.least} each=${each}
        share=${(each.figures[figure] ?? 0) / most} value=${each.figures[figure]} run=${name} unit=${WORDS[by]?.unit ?? ""} />`)}</div>
    <//>`)}</div>
    <${People} name=${name} page=${page} />
    <${CopyRequest} request=${request("GET", path)} />`;
}

function Group({ each, share, value, run, unit }) {
  const range = each.least === each.most ? count(each.least) : `${count(each.least)} – ${count(each.most)}`;
  const target = viewLink("slices", { run, by: each.by, from: each.least, to: each.most });
  return html`<a href=${target} onClick=${follow} aria-label="${range} ${unit}: ${score(value)}, ${count(each.users)} users; show people">
    <span>${range}</span>
    <svg class="bar wide" aria-hidden="true" preserveAspectRatio="none"><rect class="track" width="100%" height="100%" />
      <rect class="fill" width="${100 * share}%" height="100%" /></svg>
    <span class="number">${score(value)}</span><small class="number">${count(each.users)} users</small></a>`;
}

// The people of the group that was clicked; each leads to Recommend as of before the held-out behaviour.
function People({ name, page }) {
  const { by, from, to } = useAddress();
  const path = `/v1/people?run=${encodeURIComponent(name)}&by=${encodeURIComponent(by ?? "")}&from=${from}&to=${to}`;
  const found = useAnswer((signal) => (by ? get(path, { signal }) : null), [path]);
  if (!by) return html`<p class="muted">Choose a bar to see people of that group.</p>`;
  if (found.error) return html`<${Problem} error=${found.error} retry=${found.again} />`;
  if (!found.data || found.busy) return html`<${Busy} label="Looking for people of this group" />`;
  return html`<${Panel} id="people-title" title="People with ${by} ${from} – ${to}" class="why">
    ${page.models.length ? html`<p class="muted">Each opens in Recommend as of the moment before the held-out behaviour.</p>`
      : html`<p class="note">No model is served here, so they cannot be opened in Recommend.</p>`}
    <ul class="people">${found.data.users.map((user, place) => html`<li key=${user}><a href=${viewLink("recommend", { user, at: found.data.behaviours[place] })}
      onClick=${follow}>${user}</a> <small>${count(found.data.behaviours[place])}</small></li>`)}</ul><//>`;
}
