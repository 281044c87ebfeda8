// Why an item has its score, and which items are like it. Touch this when an explanation shows more.

import { request, send } from "../api.js";
import { Effects } from "../charts.js";
import { Busy, CopyRequest, html, milliseconds, Panel, Problem, score, signed, useAnswer } from "../parts.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";

const SHOWN = 12;
const DEADLINE_MS = 20000;

function useFocus(close) {
  const box = useRef(null);
  useEffect(() => {
    box.current?.querySelector("button")?.focus({ preventScroll: true });
    box.current?.scrollIntoView({ block: "nearest" });
    const leave = (event) => event.key === "Escape" && close();
    addEventListener("keydown", leave);
    return () => removeEventListener("keydown", leave);
  }, []);
  return box;
}

export function Why({ id, asked, model, by, titles, close }) {
  const box = useFocus(close);
  const [all, setAll] = useState(false);
  const { user, history } = asked.body;
  const question = request("POST", "/v1/explain", { user, item: id, history, by }, model.base);
  const found = useAnswer((signal) => send(question, { signal, deadline: DEADLINE_MS }), [asked, id, by]);
  const { title } = titles.of(id);
  const answer = found.data;
  const rows = answer ? explained(answer, titles) : [];
  const close_button = html`<button type="button" class="small" onClick=${close}>close</button>`;
  return html`<div ref=${box}><${Panel} id="why-title" title="Why “${title}”" aside=${close_button} class="why">
    ${found.error && html`<${Problem} error=${found.error} retry=${found.again} />`}
    ${!answer && !found.error && html`<${Busy} label="Leaving out each behaviour in turn" />`}
    ${answer && html`
      <p class="muted">Score ${score(answer.score)}. Each line: how the score changes without that behaviour, measured
        by ranking without it (${rows.length} of ${answer.behaviours} behaviours, ${milliseconds(answer.milliseconds)}).</p>
      <${Effects} label="Effects on the score of ${title}" rows=${all ? rows : rows.slice(0, SHOWN)} />
      ${rows.length > SHOWN && html`<button type="button" class="small" onClick=${() => setAll(!all)}>
        ${all ? "show fewer" : `show all ${rows.length}`}</button>`}
      <${CopyRequest} request=${question} />`}
  <//></div>`;
}

function explained(answer, titles) {
  return answer.items
    .map((item, place) => ({ item, change: -(answer.effects[place] ?? 0), place }))
    .sort((one, other) => Math.abs(other.change) - Math.abs(one.change))
    .map(({ item, change, place }) => ({
      key: place,
      name: `without ${titles.of(item).title}`,
      note: score(answer.without[place]),
      value: change,
      shown: answer.effects[place] === null ? "–" : signed(change),
    }));
}

export function Neighbours({ id, model, titles, add, close }) {
  const box = useFocus(close);
  const question = request("POST", "/v1/neighbours", { item: id, count: 10, show: titles.show }, model.base);
  const found = useAnswer(async (signal) => {
    const answer = await send(question, { signal });
    titles.note(answer);
    return answer;
  }, [id]);
  const close_button = html`<button type="button" class="small" onClick=${close}>close</button>`;
  return html`<div ref=${box}><${Panel} id="like-title" title="Like “${titles.of(id).title}”" aside=${close_button}>
    ${found.error && html`<${Problem} error=${found.error} retry=${found.again} />`}
    ${!found.data && !found.error && html`<${Busy} label="Looking for neighbours" />`}
    ${found.data && html`<p class="muted">Items whose vectors point most nearly the same way; 1 is the same direction.</p>
      <ul class="rows neighbours" aria-label="Neighbours">${found.data.items.map((item, place) => html`<li key=${String(item)}>
        <span class="name"><span>${titles.of(item).title}</span><small>${titles.of(item).note}</small></span>
        <span class="score">${score(found.data.scores[place])}</span>
        <span class="tools"><button type="button" class="plain" aria-label="Add ${titles.of(item).title} to the history"
          onClick=${() => add(item)}>+</button></span></li>`)}</ul>
      <${CopyRequest} request=${question} />`}
  <//></div>`;
}
