// What would this person get, why, and how fast was it: a history that can be changed, its
// recommendations, the timeline of the request. Touch this when the view holds another part.

import { change, useAddress } from "../address.js";
import { get, post, request, send } from "../api.js";
import {
  Busy, Choice, Combobox, CopyRequest, day, Empty, html, Panel, Problem, Slider, useAnswer, words,
} from "../parts.js";
import { useEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
import * as behaviours from "./behaviours.js";
import { HistoryList, RecommendedList } from "./recommend_lists.js";
import { RequestPanel } from "./recommend_request.js";
import { Neighbours, Why } from "./recommend_why.js";

const COUNT = 10;
const MOST_STORED = 1000; // behaviours of a stored user that are read

export default function Recommend({ model, page }) {
  const about = useAnswer((signal) => (model ? get("/v1/model", { signal }, model.base) : null), [model]);
  if (!model) {
    return html`<${Empty} title="No model is served here" command="slipstream ui BUNDLE">
      <p>Runs and simulations are in the other views. To see recommendations, give a bundle, which
      <code>slipstream export RUN --out BUNDLE</code> writes, or the address of a server.</p><//>`;
  }
  if (about.error && !about.data) return html`<${Problem} error=${about.error} retry=${about.again} />`;
  if (!about.data) return html`<${Busy} label="Reading what is served" />`;
  return html`<${Person} key=${model.base} model=${model} about=${about.data} page=${page} />`;
}

function Person({ model, about, page }) {
  const address = useAddress();
  const people = useAnswer((signal) => get("/v1/users?limit=200", { signal }, model.base), [model]);
  const user = address.user ?? people.data?.users[0] ?? null;
  const empty = address.user === "" || address.start === "empty";
  const named = empty ? null : user;
  const stored = useAnswer(async (signal) => {
    if (named === null) return [];
    const path = `/v1/users/${encodeURIComponent(named)}?limit=${MOST_STORED}`;
    return behaviours.fromStored((await get(path, { signal }, model.base)).recent);
  }, [named, model]);
  const titles = useTitles(model, about);

  const choose = (name) => change({ user: name, start: null, at: null, h: null }, { push: true });
  const find = (text) =>
    (people.data?.users ?? [])
      .filter((each) => each.toLowerCase().includes(text.toLowerCase()))
      .slice(0, 50)
      .map((each) => ({ value: each, label: each }));
  const ready = stored.data && (named === null || !stored.busy);
  const lead = html`<label class="field" for="person"><span>person</span>
        <${Combobox} id="person" label="Person" find=${find} choose=${choose} free=${true}
          initial=${named ?? ""} placeholder="an id" /></label>
      <button type="button" onClick=${() => change({ start: "empty", user: null, at: null, h: null }, { push: true })}>
        start empty</button>`;
  return html`<div class="recommend">
    ${!(ready && (named !== null || empty || address.h)) && html`<div class="controls">${lead}</div>`}
    ${people.data && !people.data.users.length && !empty && !address.user && html`<${Empty}
      title="Nobody's history is stored here yet"
      command="slipstream history import DATA --history sqlite:history.db">
      <p>Start empty and click titles together, or bring the people of prepared data:</p><//>`}
    ${stored.error && html`<${Problem} error=${stored.error} />`}
    ${ready && (named !== null || empty || address.h)
      ? html`<${Workbench} key=${String(named)} model=${model} about=${about} page=${page} user=${named}
          stored=${named === null ? [] : stored.data} titles=${titles} lead=${lead} />`
      : !stored.error && (people.busy || stored.busy) && html`<${Busy} label="Reading the history" />`}
  </div>`;
}

// Titles and features of items, asked for once each.
function useTitles(model, about) {
  const known = useRef(new Map());
  const [, setTurn] = useState(0);
  const show = about.shows.slice(0, 2);
  return useMemo(() => {
    const note = (answer) => {
      answer.items.forEach((id, place) => {
        const shown = show.map((name) => words(answer.shown?.[name]?.[place])).filter(Boolean);
        const title = answer.titles?.[place] ?? String(id);
        // An id of text, such as a SKU, is a name that people know.
        const named = typeof id === "string" && id !== title ? id : "";
        const note = [named, shown[0]].filter(Boolean).join(" · ");
        known.current.set(String(id), { title, note, shown });
      });
      setTurn((turn) => turn + 1);
    };
    return {
      show,
      note,
      of: (id) => known.current.get(String(id)) ?? { title: String(id), note: "", shown: [] },
      need: async (ids) => {
        const missing = [...new Set(ids.map(String))].filter((id) => !known.current.has(id));
        for (let at = 0; at < missing.length; at += 500) {
          note(await post("/v1/items", { items: missing.slice(at, at + 500), show }, {}, model.base));
        }
      },
    };
  }, [model, about]);
}

function Workbench({ model, about, page, user, stored, titles, lead }) {
  const address = useAddress();
  // Held back unless the address says otherwise: the last behaviour, to see whether it is found.
  const at = Math.max(0, Math.min(stored.length, Number(address.at ?? Math.max(1, stored.length - 1))));
  const edited = useMemo(() => (address.h ? behaviours.decode(address.h, about) : null), [address.h]);
  const list = useMemo(() => edited ?? stored.slice(0, at), [edited, stored, at]);
  const truth = useMemo(() => new Set(stored.slice(at).map((each) => String(each.id))), [stored, at]);
  const [by, setBy] = useState(about.tasks[0]);
  const [other, setOther] = useState("");
  const [focus, setFocus] = useState(null); // {kind: "why" | "like", id}

  const edit = (next) => change({ h: behaviours.encode(next) });
  const add = (id) => edit(behaviours.append(list, id, about));
  const reset = () => change({ h: null });
  useEffect(() => void titles.need(list.map((each) => each.id)).catch(() => {}), [list]);

  const asked = useMemo(() => recommendRequest(model, about, titles, user, list, by), [list, by, model]);
  const first = useRecommendations(asked, titles, list.length || about.task === "ranking");
  const rival = page.models.find((each) => each.name === other);
  const versus = useMemo(
    () => rival && recommendRequest(rival, about, titles, user, list, by), [rival, list, by]);
  const second = useRecommendations(versus, titles, Boolean(rival && list.length));

  const search = async (text) => {
    if (!text.trim()) return [];
    const found = await post("/v1/search", { query: text.trim(), count: 20, show: titles.show }, {}, model.base);
    titles.note(found);
    return found.items.map((id) => ({ value: id, label: titles.of(id).title, note: titles.of(id).note }));
  };
  const others = page.models.filter((each) => each.name !== model.name);
  const actions = {
    add,
    why: (id) => setFocus({ kind: "why", id }),
    like: (id) => setFocus({ kind: "like", id }),
    drop: (place) => edit(behaviours.drop(list, place)),
    move: (place, step) => edit(behaviours.move(list, place, step)),
  };
  return html`
    <div class="controls">${lead}
      ${stored.length > 1 && html`<${Slider} id="as-of" label="as of" min=${1} max=${stored.length} value=${at}
        change=${(value) => change({ at: value, h: null })}
        shown="${about.timed && at ? day(stored[at - 1].time) : ""} ${at} of ${stored.length}" />`}
      ${about.tasks.length > 1 && html`<${Choice} id="by" label="order by" value=${by} change=${setBy}
        options=${about.tasks.map((name) => ({ value: name, label: name }))} />`}
      ${others.length > 0 && html`<${Choice} id="versus" label="compare with" value=${other} change=${setOther}
        options=${[{ value: "", label: "nothing" }, ...others.map((each) => ({ value: each.name, label: each.name }))]} />`}
      ${edited && html`<button type="button" onClick=${reset}>undo changes</button>`}
    </div>
    <div class="columns ${rival ? "four" : ""}">
      <${Panel} id="history-title" title="History" aside=${html`<span class="muted">${list.length} behaviours, newest first</span>`}>
        <${Combobox} id="add" label="Add a title" placeholder="+ add a title …  ( / )" shortcut="/"
          find=${search} choose=${add} />
        <${HistoryList} list=${list} titles=${titles} about=${about} actions=${actions} />
      <//>
      <${Panel} id="recommended-title" title="Recommended"
        aside=${truth.size > 0 && !edited && html`<span class="muted">✓ came next</span>`}>
        <${RecommendedList} found=${first} titles=${titles} by=${by} truth=${truth} actions=${actions}
          empty=${!list.length && about.task !== "ranking"} />
      <//>
      ${rival && html`<${Panel} id="rival-title" title="By ${rival.name}">
        <${RecommendedList} found=${second} titles=${titles} by=${by} truth=${truth} actions=${actions}
          against=${first.data} />
      <//>`}
      <${RequestPanel} asked=${asked} found=${first} model=${model} />
    </div>
    ${focus?.kind === "why" && html`<${Why} id=${focus.id} key=${`why-${focus.id}`} asked=${asked} model=${model}
      by=${by} titles=${titles} close=${() => setFocus(null)} />`}
    ${focus?.kind === "like" && html`<${Neighbours} id=${focus.id} key=${`like-${focus.id}`} model=${model}
      titles=${titles} add=${add} close=${() => setFocus(null)} />`}
    <${CopyRequest} request=${asked} />`;
}

function recommendRequest(model, about, titles, user, list, by) {
  const body = {
    user: user ?? "visitor",
    count: COUNT,
    history: behaviours.asMessage(list, about),
    titles: true,
    show: titles.show,
    timeline: true,
  };
  if (about.tasks.length > 1) body.by = by;
  return request("POST", "/v1/recommend", body, model.base);
}

// The latest answer, with what moved since the one before it.
function useRecommendations(asked, titles, wanted) {
  const [state, setState] = useState({});
  const before = useRef(null);
  useEffect(() => {
    if (!asked || !wanted) {
      setState({});
      return undefined;
    }
    const controller = new AbortController();
    const started = performance.now();
    setState((last) => ({ ...last, busy: true }));
    send(asked, { signal: controller.signal }).then(
      (data) => {
        titles.note(data);
        const moved = compared(before.current, data.items);
        before.current = data.items.map(String);
        setState({ data, moved, roundTrip: performance.now() - started });
      },
      (error) => controller.signal.aborted || setState({ error }),
    );
    return () => controller.abort();
  }, [asked, wanted]);
  return state;
}

function compared(before, items) {
  if (!before) return items.map(() => "");
  return items.map((id, place) => {
    const last = before.indexOf(String(id));
    return last < 0 ? "new" : last > place ? `▲${last - place}` : last < place ? `▼${place - last}` : "";
  });
}
