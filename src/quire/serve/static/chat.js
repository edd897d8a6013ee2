// The playground: conversations, or texts to complete, streamed with the parameters from the form.

import { ApiProblem, api, events, KEY_HINT, keyIsMissing } from "./api.js";
import { copies } from "./clipboard.js";
import { button, make } from "./dom.js";
import { Library, newConversation } from "./library.js";
import { Answer, UserMessage } from "./message.js";
import { asCurl, firstProblem, readParameters, setSystem, startParameters, TEXT_TOKENS } from "./parameters.js";

const EXAMPLES = ["What is 27 + 45?", "Tell me a story about a rabbit.", "Who are you?"];
const $ = (id) => document.getElementById(id);

let conversation = newConversation();
let views = []; // of the messages on the page
let running = null; // the AbortController of the open answer
let library;

export function startChat() {
  startParameters(showBlocked);
  library = new Library(open);
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("prompt").value;
    if (running || !text.trim()) return;
    if (ask(text)) $("prompt").value = "";
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
  $("new").addEventListener("click", () => open(null));
  copies($("curl"), () => (showBlocked() ? null : asCurl(request([{ role: "user", content: $("prompt").value || EXAMPLES[0] }]))));
  open(null);
}

// Show a stored conversation, or a new one if it is null.
function open(chosen) {
  running?.abort();
  conversation = chosen ?? newConversation();
  library.select(conversation);
  if (chosen) setSystem(conversation.system);
  draw();
  $("prompt").focus();
}

function draw() {
  views = conversation.messages.map(view);
  $("messages").replaceChildren(...views.map(({ element }) => element));
  if (!views.length) $("messages").append(welcome());
  if (conversation.messages.at(-1)?.role === "user") {
    add(answer({ role: "assistant", content: "" }).fail("This message has no answer yet."));
  }
  $("messages").scrollTop = $("messages").scrollHeight;
  showBlocked();
}

function welcome() {
  const buttons = EXAMPLES.map((example) => button("plain", example, () => running || ask(example)));
  return make("div", "empty", make("p", "", "Ask something, or try an example:"), ...buttons);
}

const answer = (entry) => new Answer(entry, { retry, regenerate });

function view(entry) {
  return entry.role === "user" ? new UserMessage(entry, edit) : answer(entry).end();
}

function add(message) {
  $("messages").querySelector(".empty")?.remove();
  views.push(message);
  $("messages").append(message.element);
  $("messages").scrollTop = $("messages").scrollHeight;
  return message;
}

// Remove the messages from the place of `entry` on.
function cut(entry) {
  const index = conversation.messages.indexOf(entry);
  conversation.messages.length = index;
  const place = views.findIndex((one) => one.entry === entry);
  for (const { element } of views.splice(place)) element.remove();
}

// Send `text` in the place of `entry`, or return false.
function edit(entry, text) {
  if (running || showBlocked()) return false;
  cut(entry);
  return ask(text);
}

function regenerate(entry) {
  if (running || showBlocked()) return;
  cut(entry);
  generate();
}

function retry(failed) {
  if (running || showBlocked()) return;
  views = views.filter((one) => one !== failed);
  failed.element.remove();
  generate();
}

// Say why nothing can be sent, and return whether that is so.
export function showBlocked() {
  const problem = firstProblem();
  const reason = keyIsMissing() ? KEY_HINT : problem?.reason;
  $("blocked").textContent = reason ? `Not sent: ${reason}` : "";
  $("send").setAttribute("aria-disabled", reason !== undefined);
  return reason !== undefined;
}

// Send a message, or focus the field that prevents it and return false.
function ask(text) {
  if (showBlocked()) {
    const field = keyIsMissing() ? $("key") : firstProblem().field;
    field.closest("details")?.setAttribute("open", "");
    field.focus();
    return false;
  }
  const { kind, system } = readParameters();
  conversation.system = system;
  const entry = { role: "user", content: text, kind };
  conversation.messages.push(entry);
  add(new UserMessage(entry, edit));
  generate();
  return true;
}

// Return route and body of the request for the last of `messages`. A chat contains the answered messages before it.
function request(messages) {
  const { kind, system, fields } = readParameters();
  const last = messages.at(-1);
  const common = { ...fields, receipt: true };
  if ((last.kind ?? kind) === "text") {
    return { path: "v1/completions", body: { prompt: last.content, max_tokens: TEXT_TOKENS, ...common } };
  }
  const sent = [];
  for (let index = 0; index + 1 < messages.length; index++) {
    const [asked, answered] = [messages[index], messages[index + 1]];
    if (asked.kind === "text" || asked.role !== "user" || answered.role !== "assistant" || !answered.content) continue;
    sent.push(asked, answered);
  }
  const chat = [...sent, last].map(({ role, content }) => ({ role, content }));
  if (system) chat.unshift({ role: "system", content: system });
  return { path: "v1/chat/completions", body: { messages: chat, ...common } };
}

// Answer the last message of the conversation.
async function generate() {
  const asked = conversation; // another one may be opened meanwhile
  const { path, body } = request(asked.messages);
  library.select(asked);
  library.add(asked);
  const plain = path === "v1/completions" || "response_format" in body;
  const entry = { role: "assistant", content: "", plain };
  const message = add(answer(entry).begin());
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
  if (!message.problem && (entry.content || entry.thought)) {
    asked.messages.push(entry);
    library.save(asked);
  } else if (!message.problem) {
    message.fail(running.signal.aborted ? "You stopped before the first token." : "The answer is empty.");
  }
  running = null;
  busy(false);
  $("announce").textContent = message.summary;
  follow();
}

function busy(is) {
  if ([$("send"), $("stop"), document.body].includes(document.activeElement)) $("prompt").focus();
  $("send").hidden = is;
  $("stop").hidden = !is;
}

// Scroll to the end, unless the user has scrolled up.
function follow() {
  const box = $("messages");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}
