// Requests to this server: API key, errors with the server's message, and server-sent events.

const KEY = "quire-key"; // stored for this tab only
export const KEY_HINT = "this server needs an API key. Enter it at the top right.";
let needsKey = false;

export const storedKey = () => sessionStorage.getItem(KEY) ?? "";

export const setKey = (key) => sessionStorage.setItem(KEY, key);

export const keyIsMissing = () => needsKey && !storedKey();

export class ApiProblem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Send a request and return its response, or throw ApiProblem. `body`, if given, is posted as JSON.
export async function api(path, { body, signal, method = body === undefined ? "GET" : "POST" } = {}) {
  const headers = {};
  if (storedKey()) headers.authorization = `Bearer ${storedKey()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = { method, headers, signal, cache: "no-cache" };
  if (body !== undefined) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new ApiProblem("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // not an error of this server, such as a proxy's: show its text
  }
  if (response.status === 401) {
    message = storedKey()
      ? "The server does not accept this API key. Correct it at the top right."
      : "This server needs an API key. Enter it at the top right.";
  }
  throw new ApiProblem(message || `The server answered ${response.status}.`, response.status);
}

// Yield the events of a stream as { event, data }. After `silent_ms` without a byte it ends with ApiProblem.
export async function* events(response, silent_ms = Infinity) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    while (true) {
      const { done, value } = await within(reader.read(), silent_ms);
      if (done) return;
      text += value;
      const blocks = text.split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const found = { event: "message", data: "" };
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) found.event = line.slice(7);
          if (line.startsWith("data: ")) found.data += line.slice(6);
        }
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function within(promise, limit_ms) {
  if (limit_ms === Infinity) return promise;
  let timer;
  const silence = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new ApiProblem("The server is silent.", 0)), limit_ms);
  });
  return Promise.race([promise, silence]).finally(() => clearTimeout(timer));
}

// The key field that all pages have in their header. `changed` is called when the user has entered a key.
export async function startKey(changed) {
  const about = await (await api("static/about.json")).json();
  const field = document.getElementById("key");
  needsKey = about.needs_key;
  document.getElementById("key-field").hidden = !needsKey;
  field.value = storedKey();
  document.getElementById("key-field").addEventListener("submit", (event) => event.preventDefault());
  field.addEventListener("change", () => {
    setKey(field.value.trim());
    changed();
  });
  if (keyIsMissing()) field.focus();
}
