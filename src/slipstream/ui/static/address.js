// What the page shows, as its address: small things in the query, an edited history in the fragment
// (which no server receives). Touch this when another thing should be shared by copying the address.

import { useEffect, useState } from "./vendor/hooks.js";

const listeners = new Set();

export function read() {
  const query = Object.fromEntries(new URLSearchParams(location.search));
  const fragment = new URLSearchParams(location.hash.slice(1)).get("h");
  return fragment === null ? query : { ...query, h: fragment };
}

// Change the address; null removes a name. `push` makes a step that the back button undoes.
export function change(values, { push = false } = {}) {
  const next = { ...read(), ...values };
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(next)) {
    if (name !== "h" && value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const text = query.toString();
  const fragment = next.h ? `#h=${encodeURIComponent(next.h)}` : "";
  const address = `${location.pathname}${text ? `?${text}` : ""}${fragment}`;
  history[push ? "pushState" : "replaceState"](null, "", address);
  for (const listener of listeners) listener();
}

addEventListener("popstate", () => {
  for (const listener of listeners) listener();
});

export function useAddress() {
  const [found, setFound] = useState(read);
  useEffect(() => {
    const listener = () => setFound(read());
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return found;
}

export function viewLink(view, values = {}) {
  const query = new URLSearchParams({ view, ...values });
  return `/?${query}`;
}

// Follow a link to a view without loading the page again.
export function follow(event) {
  if (event.metaKey || event.ctrlKey || event.shiftKey || event.button !== 0) return;
  const target = event.currentTarget.getAttribute("href");
  event.preventDefault();
  history.pushState(null, "", target);
  for (const listener of listeners) listener();
}
