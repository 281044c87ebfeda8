// The two lists of Recommend: what the person did, what the model answers. Arrow keys move between
// rows; letters act on the row in focus. Touch this when a row shows or does something else.

import { Bar, Busy, day, Empty, html, Problem, score } from "../parts.js";

// Keys of a list: arrows move, the others are `acts` by key.
function keys(event, acts) {
  if (event.target !== event.currentTarget) return;
  const rows = [...event.currentTarget.parentElement.children];
  const place = rows.indexOf(event.currentTarget);
  if (event.altKey && (event.key === "ArrowUp" || event.key === "ArrowDown")) {
    acts[`Alt${event.key}`]?.();
  } else if (event.key === "ArrowDown") {
    rows[place + 1]?.focus();
  } else if (event.key === "ArrowUp") {
    rows[place - 1]?.focus();
  } else if (acts[event.key]) {
    acts[event.key]();
  } else {
    return;
  }
  event.preventDefault();
}

export function HistoryList({ list, titles, about, actions }) {
  if (!list.length) {
    return html`<${Empty} title="An empty history">
      <p>Type a title above; press <kbd>/</kbd> to get there. Every title that is added changes the
      recommendations.</p><//>`;
  }
  const rows = list.map((each, place) => ({ ...each, place })).reverse();
  return html`<ol class="rows" aria-label="History, newest first">
    ${rows.map(({ id, time, place }, shownAt) => {
      const { title, note } = titles.of(id);
      return html`<li key=${`${place}-${id}`} tabindex=${shownAt ? -1 : 0} onKeyDown=${(event) =>
        keys(event, {
          Delete: () => actions.drop(place), n: () => actions.like(id),
          AltArrowUp: () => actions.move(place, 1), AltArrowDown: () => actions.move(place, -1),
        })}>
        <button type="button" class="plain" aria-label="Drop ${title}" onClick=${() => actions.drop(place)}>×</button>
        <span class="name"><span>${title}</span><small>${note}</small></span>
        <small class="when">${about.timed && time !== null ? day(time) : ""}</small>
        <span class="tools">
          <button type="button" class="plain" aria-label="Move ${title} later" disabled=${place === list.length - 1}
            onClick=${() => actions.move(place, 1)}>↑</button>
          <button type="button" class="plain" aria-label="Move ${title} earlier" disabled=${place === 0}
            onClick=${() => actions.move(place, -1)}>↓</button>
          <button type="button" class="plain" aria-label="Titles like ${title}" onClick=${() => actions.like(id)}>≈</button>
        </span></li>`;
    })}
  </ol>`;
}

export function RecommendedList({ found, titles, by, truth, actions, against, empty }) {
  if (empty) {
    return html`<${Empty} title="Nothing to go by">
      <p>This model reads what a person did. Add a title on the left.</p><//>`;
  }
  if (found.error) return html`<${Problem} error=${found.error} />`;
  if (!found.data) return html`<${Busy} label="Recommending" />`;
  const { items, scores } = found.data;
  if (!items.length) return html`<${Empty} title="No item is left to recommend" />`;
  const values = scores[by] ?? Object.values(scores)[0];
  const top = Math.max(...values.map(Math.abs), 1e-9);
  const rivals = against ? against.items.map(String) : null;
  return html`<ol class="rows ranked ${found.busy ? "stale-rows" : ""}" aria-label="Recommended, best first" aria-busy=${String(Boolean(found.busy))}>
    ${items.map((id, place) => {
      const { title, note } = titles.of(id);
      const right = truth.has(String(id));
      const mark = rivals ? difference(rivals, id, place) : found.moved?.[place] ?? "";
      return html`<li key=${String(id)} tabindex=${place ? -1 : 0} class=${right ? "right" : ""} onKeyDown=${(event) =>
        keys(event, {
          "+": () => actions.add(id), Enter: () => actions.add(id), w: () => actions.why(id), n: () => actions.like(id),
        })}>
        <span class="rank">${place + 1}</span>
        <span class="name"><span>${title}${right && html` <b class="truth" title="came next">✓<span class="hidden"> came next</span></b>`}</span>
          <small>${note}</small></span>
        <span class="moved">${mark && html`<span class="hidden">moved </span>`}${mark}</span>
        <span class="score"><${Bar} share=${Math.abs(values[place]) / top} />${score(values[place])}</span>
        <span class="tools">
          <button type="button" class="small" aria-label="Why ${title}" onClick=${() => actions.why(id)}>why?</button>
          <button type="button" class="plain" aria-label="Titles like ${title}" onClick=${() => actions.like(id)}>≈</button>
          <button type="button" class="plain" aria-label="Add ${title} to the history" onClick=${() => actions.add(id)}>+</button>
        </span></li>`;
    })}
  </ol>`;
}

function difference(rivals, id, place) {
  const other = rivals.indexOf(String(id));
  return other < 0 ? "only here" : other === place ? "same" : other > place ? `▲${other - place}` : `▼${place - other}`;
}
