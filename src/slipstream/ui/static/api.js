// Requests to the server that this page came from, and how to repeat them elsewhere.
// Touch this when requests are sent, refused or quoted in another way.

let key = null; // the API key: in memory only, gone with the tab
let keyAsked = null; // a promise while the person is asked for the key
let askForKey = async () => null;

export class Refusal extends Error {
  constructor(status, code, detail) {
    super(detail);
    this.status = status;
    this.code = code;
  }
}

export function whenKeyIsNeeded(ask) {
  askForKey = ask;
}

export const hasKey = () => key !== null;

export function forgetKey() {
  key = null;
}

async function newKey(refused) {
  keyAsked ??= askForKey(refused).finally(() => (keyAsked = null));
  key = await keyAsked;
  return key !== null;
}

// A request as data: what `send` sends and what `asCurl` and `asPython` quote.
export function request(method, path, body = undefined, base = "") {
  return { method, path: base + path, body };
}

export async function send(asked, { signal, deadline } = {}) {
  for (let attempt = 0; ; attempt++) {
    const headers = {};
    if (asked.body !== undefined) headers["content-type"] = "application/json";
    if (key !== null) headers["x-api-key"] = key;
    if (deadline) headers["x-slipstream-deadline-ms"] = String(deadline);
    let answer;
    try {
      const body = asked.body === undefined ? undefined : JSON.stringify(asked.body);
      answer = await fetch(asked.path, { method: asked.method, headers, body, signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refusal(0, "unreachable", "The server does not answer. Is it still running?");
    }
    const text = await answer.text();
    if (answer.ok) return parse(text);
    const problem = readProblem(text, answer.status);
    if (answer.status === 401 && attempt < 5 && (await newKey(key !== null))) continue;
    throw problem;
  }
}

// Ids have up to 63 bits: a number that would lose digits stays text, which servers take as well.
function parse(text) {
  return JSON.parse(text, (_name, value, context) =>
    typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source ?? "")
      ? context.source
      : value,
  );
}

function readProblem(text, status) {
  try {
    const { error, detail } = JSON.parse(text);
    return new Refusal(status, error, detail);
  } catch {
    return new Refusal(status, "unknown", `The server answered ${status}.`);
  }
}

export const get = (path, options = {}, base = "") =>
  send(request("GET", path, undefined, base), options);
export const post = (path, body, options = {}, base = "") =>
  send(request("POST", path, body, base), options);

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const place = (asked) => new URL(asked.path, location.href).href;

export function asCurl(asked) {
  const words = ["curl", "-s"];
  if (asked.method !== "GET" && asked.method !== "POST") words.push("-X", asked.method);
  words.push(quoted(place(asked)));
  if (key !== null) words.push('-H "x-api-key: $SLIPSTREAM_API_KEY"');
  if (asked.body !== undefined) {
    words.push("-H 'content-type: application/json'", "-d", quoted(JSON.stringify(asked.body)));
  }
  return words.join(" ");
}

export function asPython(asked) {
  const headers = [];
  if (asked.body !== undefined) headers.push(`"content-type": "application/json"`);
  if (key !== null) headers.push(`"x-api-key": os.environ["SLIPSTREAM_API_KEY"]`);
  const body = asked.body === undefined ? "None" : "json.dumps(body).encode()";
  return [
    `import json${key === null ? "" : ", os"}, urllib.request`,
    "",
    ...(asked.body === undefined ? [] : [`body = ${pythonText(asked.body)}`]),
    "request = urllib.request.Request(",
    `    ${JSON.stringify(place(asked))}, ${body}, {${headers.join(", ")}}, method="${asked.method}"`,
    ")",
    "print(json.load(urllib.request.urlopen(request)))",
  ].join("\n");
}

function pythonText(value) {
  if (value === null || value === undefined) return "None";
  if (value === true || value === false) return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(pythonText).join(", ")}]`;
  if (typeof value === "object") {
    const pairs = Object.entries(value).filter(([, each]) => each !== undefined);
    return `{${pairs.map(([name, each]) => `${JSON.stringify(name)}: ${pythonText(each)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}
