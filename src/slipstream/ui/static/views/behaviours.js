// A history that is edited: behaviours oldest first, each {id, time, actions}. No DOM, no requests.
// Touch this when a history can be changed in another way.

const STEP_SECONDS = 60; // between the last behaviour and a title that is added

export function fromStored(recent) {
  const names = Object.keys(recent.actions ?? {});
  return recent.items.map((id, place) => ({
    id,
    time: recent.timestamps?.[place] ?? null,
    actions: Object.fromEntries(names.map((name) => [name, recent.actions[name][place]])),
  }));
}

export function append(list, id, { timed, actions }) {
  const last = list[list.length - 1];
  const time = timed ? (last ? last.time + STEP_SECONDS : Math.floor(Date.now() / 1000)) : null;
  return [...list, { id, time, actions: Object.fromEntries(actions.map((name) => [name, 1])) }];
}

export const drop = (list, place) => list.filter((_, other) => other !== place);

// Swap two neighbours in order; the times stay where they are, because time never goes back.
export function move(list, place, by) {
  const other = place + by;
  if (other < 0 || other >= list.length) return list;
  const next = list.slice();
  next[place] = { ...list[other], time: list[place].time };
  next[other] = { ...list[place], time: list[other].time };
  return next;
}

export function asMessage(list, { timed, actions, max_len: most }) {
  const kept = list.slice(-most);
  const message = { items: kept.map((each) => each.id) };
  if (timed) message.timestamps = kept.map((each) => each.time ?? 0);
  if (actions.length) {
    message.actions = Object.fromEntries(
      actions.map((name) => [name, kept.map((each) => each.actions[name] ?? 0)]),
    );
  }
  return message;
}

// In the address: ids, and times as differences; actions are taken to be 1.
export function encode(list) {
  let before = 0;
  return JSON.stringify(
    list.map(({ id, time }) => {
      const difference = time === null ? 0 : time - before;
      before = time ?? 0;
      return [id, difference];
    }),
  );
}

export function decode(text, { timed, actions }) {
  let time = 0;
  try {
    return JSON.parse(text).map(([id, difference]) => {
      time += difference;
      const done = Object.fromEntries(actions.map((name) => [name, 1]));
      return { id, time: timed ? time : null, actions: done };
    });
  } catch {
    return null;
  }
}
