// The playground: a conversation, or text to complete, streamed with the parameters from the form.

import { ApiProblem, api, events } from "./api.js";
import { copies } from "./clipboard.js";
import { Message } from "./message.js";
import { asCurl, readParameters, startParameters } from "./parameters.js";

const TEXT_TOKENS = 512; // the default of /v1/completions is 16; that of chat is the rest of the context
const EXAMPLES = ["What is 27 + 45?", "Tell me a story about a rabbit.", "Who are you?"];
const $ = (id) => document.getElementById(id);

let history = []; // { role, content } of the messages so far
let running = null; // the AbortController of the open answer

export function startChat() {
  startParameters();
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("prompt").value;
    if (running || !text.trim()) return;
    $("prompt").value = "";
    ask(text);
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  $("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  $("clear").addEventListener("click", clear);
  copies($("curl"), () => asCurl(request($("prompt").value || EXAMPLES[0])));
  clear();
}

function clear() {
  running?.abort();
  history = [];
  const empty = document.createElement("div");
  empty.className = "empty";
  empty.append("Ask something, or try an example:", document.createElement("br"));
  for (const example of EXAMPLES) {
    const button = Object.assign(document.createElement("button"), { className: "plain", textContent: example });
    button.addEventListener("click", () => ask(example));
    empty.append(button);
  }
  $("messages").replaceChildren(empty);
  $("prompt").focus();
}

// Return route and body of the request for `text` after the conversation so far.
function request(text) {
  const { kind, system, fields } = readParameters();
  const common = { ...fields, receipt: true };
  if (kind === "text") return { path: "v1/completions", body: { prompt: text, max_tokens: TEXT_TOKENS, ...common } };
  const messages = [...history, { role: "user", content: text }];
  if (system) messages.unshift({ role: "system", content: system });
  return { path: "v1/chat/completions", body: { messages, ...common } };
}

async function ask(text) {
  const { path, body } = request(text);
  const conversation = history; // `clear` may replace it meanwhile
  $("messages").querySelector(".empty")?.remove();
  add(new Message("user", text));
  const message = add(new Message("assistant"));
  running = new AbortController();
  busy(true);
  try {
    const stream = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    const response = await api(path, { body: { ...body, ...stream }, signal: running.signal });
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiProblem(chunk.error.message, 200);
      message.take(chunk);
      follow();
    }
    message.end();
  } catch (problem) {
    if (problem.name === "AbortError") message.end("stopped");
    else message.fail(problem instanceof ApiProblem ? problem.message : `The stream ended early: ${problem.message}`);
  }
  if (path.includes("chat")) {
    conversation.push({ role: "user", content: text });
    if (message.text) conversation.push({ role: "assistant", content: message.text });
    else conversation.pop();
  }
  running = null;
  busy(false);
  $("announce").textContent = message.summary;
  follow();
}

function add(message) {
  $("messages").append(message.element);
  $("messages").scrollTop = $("messages").scrollHeight;
  return message;
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("prompt").focus();
}

// Scroll to the end, unless the user has scrolled up.
function follow() {
  const box = $("messages");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}
