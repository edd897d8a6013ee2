// The playground: a conversation, or plain text to continue, streamed with the parameters beside it.

import { ApiProblem, api, events } from "./api.js";
import { copies } from "./clipboard.js";
import { Message } from "./message.js";
import { asCurl, readParameters, startParameters } from "./parameters.js";

const TEXT_TOKENS = 512; // the route's own default is 16; that of a chat is the rest of the context
const EXAMPLES = ["What is 27 + 45?", "Tell me a story about a rabbit.", "Who are you?"];
const $ = (id) => document.getElementById(id);

let history = []; // of { role, content }
let running = null; // the AbortController of the answer that is being written

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
  empty.append("Ask something, or try:", document.createElement("br"));
  for (const example of EXAMPLES) {
    const button = Object.assign(document.createElement("button"), { className: "plain", textContent: example });
    button.addEventListener("click", () => ask(example));
    empty.append(button);
  }
  $("messages").replaceChildren(empty);
  $("prompt").focus();
}

// The route and the body for `text`, after what was said before.
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
  const conversation = history; // it may be cleared meanwhile
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
    else message.fail(problem instanceof ApiProblem ? problem.message : `The stream broke: ${problem.message}`);
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

// Keep the end in sight, unless the reader has scrolled up.
function follow() {
  const box = $("messages");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}
