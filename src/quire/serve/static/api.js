// Requests to this server: API key, errors with the server's message, and server-sent events.

const KEY = "quire-key"; // stored for this tab only

export const storedKey = () => sessionStorage.getItem(KEY) ?? "";

export const setKey = (key) => sessionStorage.setItem(KEY, key);

export class ApiProblem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Send a request and return its response, or throw ApiProblem. `body`, if given, is posted as JSON.
export async function api(path, { body, signal } = {}) {
  const headers = {};
  if (storedKey()) headers.authorization = `Bearer ${storedKey()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = { method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-cache" };
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
  throw new ApiProblem(message || `The server answered ${response.status}.`, response.status);
}

// Yield the events of a stream as { event, data }.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
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
