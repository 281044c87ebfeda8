// The shell: views, the model that is asked, the state of the server, keys and dialogs.
// A view is one line of VIEWS and one file of views/, whose default export is a component that gets
// {model, page}. Touch this when a view is added.

import { change, follow, useAddress, viewLink } from "./address.js";
import { get, whenKeyIsNeeded } from "./api.js";
import { Busy, Choice, html, Problem, useRepeatedly } from "./parts.js";
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { render } from "./vendor/preact.js";

const VIEWS = [
  { id: "recommend", title: "Recommend", load: () => import("./views/recommend.js") },
  { id: "training", title: "Training", load: () => import("./views/training.js") },
  { id: "pipeline", title: "Pipeline", load: () => import("./views/pipeline.js") },
  { id: "fleet", title: "Fleet", load: () => import("./views/fleet.js") },
  { id: "scale", title: "Scale", load: () => import("./views/scale.js") },
  { id: "slices", title: "Slices", load: () => import("./views/slices.js") },
];
const KEYS = [
  ["/", "search a title, or the first field of a view"],
  ["↑ ↓", "move in a list"],
  ["+", "add the title in focus to the history"],
  ["w", "why is the title in focus recommended"],
  ["n", "titles like the one in focus"],
  ["Delete", "drop the behaviour in focus"],
  ["Alt ↑ ↓", "move the behaviour in focus"],
  [`1 – ${VIEWS.length}`, "go to a view"],
  ["?", "show these keys"],
];

function Page() {
  const address = useAddress();
  const [page, setPage] = useState(null);
  const [error, setError] = useState(null);
  const [state, setState] = useState({ word: "starting", kind: "" });
  const chosen = VIEWS.find((view) => view.id === address.view) ?? VIEWS[0];

  const open = () => get("/v1/page").then((found) => { setPage(found); setError(null); }, setError);
  useEffect(() => void open(), []);
  useEffect(() => {
    document.title = `${chosen.title} · Slipstream`;
  }, [chosen]);
  const model = page?.models.find((each) => each.name === address.model) ?? page?.models[0] ?? null;
  useRepeatedly(async () => page && setState(await serverState(model)), 3, [page, model]);

  return html`
    <a class="skip" href="#view">Skip to the view</a>
    <header class="top">
      <a class="brand" href="/" onClick=${follow}>slipstream</a>
      <nav aria-label="Views">
        ${VIEWS.map((view) => html`<a key=${view.id} href=${viewLink(view.id)} onClick=${follow}
          aria-current=${view === chosen ? "page" : undefined}>${view.title}</a>`)}
      </nav>
      <div class="about">
        ${page && page.models.length > 1
          ? html`<${Choice} id="model" label="model" value=${model.name}
              options=${page.models.map((each) => ({ value: each.name, label: each.name }))}
              change=${(name) => change({ model: name }, { push: true })} />`
          : model && html`<span class="muted">${model.name}</span>`}
        <span class="state ${state.kind}" role="status"><i aria-hidden="true"></i>${state.word}</span>
        <button type="button" class="small" aria-label="Show the keys" onClick=${showKeys}>?</button>
      </div>
    </header>
    ${state.kind === "bad" && page && html`<p class="stale" role="alert">
      The server does not answer since ${state.since}. What is shown is from before; the page goes on
      trying.</p>`}
    <main id="view" tabindex="-1">
      ${page
        ? html`<${View} key=${chosen.id} view=${chosen} model=${model} page=${page} />`
        : error
          ? html`<${Problem} error=${error} retry=${open} />`
          : html`<${Busy} label="Asking the server what it shows" />`}
    </main>
    <${Keys} /><${KeyDialog} />`;
}

let lastAnswer = new Date();
async function serverState(model) {
  if (!model) return { word: "no model", kind: "" };
  try {
    const fleet = await get("/v1/fleet", {}, model.base);
    lastAnswer = new Date();
    const ready = fleet.instances.filter((each) => each.state === "ready").length;
    const all = fleet.instances.length;
    if (ready === all) return { word: "ready", kind: "good" };
    return { word: `${ready} of ${all} ready`, kind: ready ? "warn" : "bad-fleet" };
  } catch (error) {
    if (error.status !== 0) return { word: error.code, kind: "warn" };
    return { word: "no answer", kind: "bad", since: lastAnswer.toLocaleTimeString() };
  }
}

function View({ view, model, page }) {
  const [Shown, setShown] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    view.load().then((found) => setShown(() => found.default), setError);
  }, []);
  if (error) return html`<${Problem} error=${error} />`;
  return Shown ? html`<${Shown} model=${model} page=${page} />` : html`<${Busy} />`;
}

// ---- dialogs ------------------------------------------------------------------------------------

const showKeys = () => document.getElementById("keys").showModal();

function Keys() {
  return html`<dialog id="keys" aria-labelledby="keys-title">
    <h2 id="keys-title">Keys</h2>
    <dl>${KEYS.map(([key, does]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${does}</dd></div>`)}</dl>
    <form method="dialog"><button>Close</button></form>
  </dialog>`;
}

function KeyDialog() {
  const [wrong, setWrong] = useState(false);
  const dialog = useRef(null);
  const field = useRef(null);
  const answer = useRef(null);
  useEffect(() => {
    whenKeyIsNeeded((refused) => new Promise((resolve) => {
      answer.current = resolve;
      setWrong(refused);
      dialog.current.showModal();
      field.current.value = "";
      field.current.focus();
    }));
  }, []);
  const close = (value) => {
    dialog.current.close();
    answer.current?.(value);
    answer.current = null;
  };
  const give = (event) => {
    event.preventDefault();
    close(field.current.value || null);
  };
  return html`<dialog ref=${dialog} aria-labelledby="key-title" onCancel=${() => close(null)}>
    <form onSubmit=${give}>
      <h2 id="key-title">This server asks for a key</h2>
      <p>${wrong ? "The server did not take that key. " : ""}It stays in this tab's memory and is gone
        when the tab closes. Draining and killing an instance needs an admin key.</p>
      <label>API key <input ref=${field} type="password" autocomplete="off" required /></label>
      <p><button type="submit">Use this key</button>
        <button type="button" onClick=${() => close(null)}>Cancel</button></p>
    </form>
  </dialog>`;
}

addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "?") showKeys();
  else if (event.key === "/") {
    event.preventDefault();
    (document.querySelector("[data-shortcut='/']") ?? document.querySelector("main input"))?.focus();
  } else if (/^[1-9]$/.test(event.key) && VIEWS[event.key - 1]) {
    change({ ...cleared(), view: VIEWS[event.key - 1].id }, { push: true });
  }
});

const cleared = () => ({ h: null });

const root = document.getElementById("page");
root.textContent = "";
render(html`<${Page} />`, root);
