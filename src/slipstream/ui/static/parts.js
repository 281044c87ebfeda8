// Parts that every view is made of: states, buttons, fields, bars. Touch this when several views
// should look or behave in another way; charts are in charts.js.

import { asCurl, asPython } from "./api.js";
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";
import { h } from "./vendor/preact.js";

export const html = htm.bind(h);

// ---- numbers and words --------------------------------------------------------------------------

export const count = (value) => value.toLocaleString("en");
export const milliseconds = (value) =>
  value === null || value === undefined ? "–" : `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) {
    value /= 1024;
    place++;
  }
  return `${place && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[place]}`;
}
export function score(value) {
  if (value === null || value === undefined) return "–";
  const text = value.toFixed(3).replace(/^(-?)0\./, "$1.");
  return text === "-.000" ? ".000" : text;
}
export const signed = (value) =>
  value === null || value === undefined ? "–" : (value > 0 ? "+" : value < 0 ? "−" : "") + score(Math.abs(value));
export const day = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 10);
export function age(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}
export const words = (value) =>
  Array.isArray(value) ? value.join(" · ") : value === null || value === undefined ? "" : String(value);

// ---- states -------------------------------------------------------------------------------------

export function Panel({ title, aside, children, class: more = "", id }) {
  return html`<section class="panel ${more}" aria-labelledby=${id}>
    ${title && html`<header><h2 id=${id}>${title}</h2>${aside}</header>`}
    ${children}
  </section>`;
}

export function Empty({ title, children, command }) {
  return html`<div class="empty">
    <p><strong>${title}</strong></p>
    ${children}
    ${command && html`<${Command} text=${command} />`}
  </div>`;
}

export function Problem({ error, retry }) {
  if (!error) return null;
  return html`<div class="problem" role="alert">
    <p>${error.message}</p>
    ${retry && html`<button type="button" onClick=${retry}>Try again</button>`}
  </div>`;
}

export function Busy({ label = "Loading" }) {
  return html`<div class="busy" role="status"><span aria-hidden="true"></span>${label} …</div>`;
}

// ---- copying ------------------------------------------------------------------------------------

async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea"); // without the right to the clipboard
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

export function CopyButton({ text, children, label }) {
  const [done, setDone] = useState("");
  useEffect(() => {
    if (!done) return undefined;
    const timer = setTimeout(() => setDone(""), 1500);
    return () => clearTimeout(timer);
  }, [done]);
  const copy = async () => setDone((await toClipboard(text())) ? "copied" : "cannot copy");
  return html`<button type="button" class="small" onClick=${copy} aria-label=${label}>
    ${children}<span role="status" class="done">${done && ` ${done}`}</span>
  </button>`;
}

export function CopyRequest({ request }) {
  if (!request) return null;
  const name = `${request.method} ${request.path.split("?")[0]}`;
  return html`<div class="copies">
    <span class="muted">${name}</span>
    <${CopyButton} text=${() => asCurl(request)} label="Copy ${name} as curl">copy as curl<//>
    <${CopyButton} text=${() => asPython(request)} label="Copy ${name} as Python">copy as Python<//>
  </div>`;
}

export function Command({ text }) {
  return html`<p class="command"><code>${text}</code>
    <${CopyButton} text=${() => text} label="Copy the command">copy<//></p>`;
}

// ---- fields -------------------------------------------------------------------------------------

// A field with a list of what may be meant. `find` returns [{value, label, note}] or a promise.
export function Combobox({ label, find, choose, placeholder, initial = "", shortcut, free, id }) {
  const [text, setText] = useState(initial);
  const [options, setOptions] = useState([]);
  const [open, setOpen] = useState(false);
  const [active, setActive] = useState(-1);
  const turn = useRef(0);
  useEffect(() => setText(initial), [initial]);

  async function look(value) {
    const mine = ++turn.current;
    let found = [];
    try {
      found = await find(value);
    } catch (error) {
      found = [{ value: null, label: error.message, note: "" }];
    }
    if (mine !== turn.current) return;
    setOptions(found);
    setActive(found.length && !free ? 0 : -1);
  }
  function edit(event) {
    setText(event.target.value);
    setOpen(true);
    look(event.target.value);
  }
  function take(option) {
    if (option && option.value === null) return;
    if (!option && !(free && text.trim())) return;
    turn.current++;
    setOpen(false);
    setActive(-1);
    choose(option ? option.value : text.trim(), option);
    setText(free ? (option ? String(option.value) : text.trim()) : "");
  }
  function press(event) {
    const last = options.length - 1;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (!open) {
        setOpen(true);
        look(text);
        return;
      }
      const step = event.key === "ArrowDown" ? 1 : -1;
      setActive(Math.max(0, Math.min(last, active + step)));
    } else if (event.key === "Enter") {
      event.preventDefault();
      take(open ? options[active] : undefined);
    } else if (event.key === "Escape" && open) {
      event.stopPropagation();
      setOpen(false);
    }
  }
  const shown = open && options.length > 0;
  return html`<div class="combobox">
    <input id=${id} type="text" role="combobox" aria-label=${label} aria-expanded=${String(shown)}
      aria-controls="${id}-list" aria-autocomplete="list" autocomplete="off" spellcheck="false"
      aria-activedescendant=${shown && active >= 0 ? `${id}-${active}` : undefined}
      placeholder=${placeholder} value=${text} data-shortcut=${shortcut}
      onInput=${edit} onKeyDown=${press}
      onFocus=${() => { setOpen(true); look(free ? "" : text); }}
      onBlur=${() => setTimeout(() => setOpen(false), 150)} />
    <ul id="${id}-list" role="listbox" aria-label=${label} hidden=${!shown}>
      ${options.map((option, place) => html`<li id="${id}-${place}" role="option" key=${place}
        aria-selected=${String(place === active)}
        onMouseDown=${(event) => { event.preventDefault(); take(option); }}>
        <span>${option.label}</span>${option.note && html`<small>${option.note}</small>`}
      </li>`)}
    </ul>
  </div>`;
}

export function Slider({ label, value, min, max, step = 1, change, shown, id }) {
  return html`<label class="slider" for=${id}>
    <span>${label}</span>
    <input id=${id} type="range" min=${min} max=${max} step=${step} value=${value}
      aria-valuetext=${shown} onInput=${(event) => change(Number(event.target.value))} />
    <output for=${id}>${shown}</output>
  </label>`;
}

export function Choice({ label, value, options, change, id }) {
  return html`<label class="choice" for=${id}><span>${label}</span>
    <select id=${id} value=${value} onChange=${(event) => change(event.target.value)}>
      ${options.map((option) => html`<option value=${option.value} key=${option.value}
        selected=${option.value === value}>${option.label}</option>`)}
    </select></label>`;
}

// A button that asks once more before it does what cannot be undone.
export function Careful({ label, sure, act, disabled }) {
  const [asked, setAsked] = useState(false);
  useEffect(() => {
    if (!asked) return undefined;
    const timer = setTimeout(() => setAsked(false), 4000);
    return () => clearTimeout(timer);
  }, [asked]);
  const press = () => {
    if (asked) act();
    setAsked(!asked);
  };
  return html`<button type="button" class="small ${asked ? "sure" : ""}" disabled=${disabled}
    onClick=${press}>${asked ? sure : label}</button>`;
}

// ---- bars ---------------------------------------------------------------------------------------

// A share from 0 to 1, drawn; its number stands beside it, so the bar itself is decoration.
export function Bar({ share, kind = "" }) {
  const width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return html`<svg class="bar ${kind}" aria-hidden="true" preserveAspectRatio="none">
    <rect class="track" width="100%" height="100%" /><rect class="fill" width=${width} height="100%" />
  </svg>`;
}

// ---- doing things again and again ---------------------------------------------------------------

// Call `work` now and `seconds` after it ended, while the view and the tab are shown.
export function useRepeatedly(work, seconds, inputs) {
  useEffect(() => {
    let timer, stopped = false;
    const again = async () => {
      if (!document.hidden) await work();
      if (!stopped) timer = setTimeout(again, seconds * 1000);
    };
    again();
    return () => {
      stopped = true;
      clearTimeout(timer);
    };
  }, inputs);
}

// Ask for something: {data, error, busy, again}. What was found stays while it is asked for anew.
export function useAnswer(ask, inputs) {
  const [state, setState] = useState({ busy: true });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const controller = new AbortController();
    setState((before) => ({ ...before, busy: true }));
    Promise.resolve(ask(controller.signal)).then(
      (data) => controller.signal.aborted || setState({ data, busy: false }),
      (error) =>
        controller.signal.aborted || setState((before) => ({ data: before.data, error, busy: false })),
    );
    return () => controller.abort();
  }, [...inputs, turn]);
  return { ...state, again: () => setTurn(turn + 1) };
}
