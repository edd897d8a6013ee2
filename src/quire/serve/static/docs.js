// The API reference: routes, fields and limits from /openapi.json, and a form to try each route.

import { ApiProblem, api, events, keyIsMissing, startKey, storedKey } from "./api.js";
import { copyButton } from "./clipboard.js";
import { button, make } from "./dom.js";
import { startTheme } from "./themes.js";

const $ = (id) => document.getElementById(id);
const MAX_SHOWN = 100_000; // characters of an answer
const CHAT = [{ role: "user", content: "What is 27 + 45?" }];
// Values for required fields in the examples, by field name.
const SAMPLES = { messages: CHAT, prompt: "What is 27 + 45?", input: "What is 27 + 45?", max_tokens: 64, tokens: [72, 105] };
const EXAMPLES = { "/tokenize": { prompt: "What is 27 + 45?" }, "/v1/completions": { prompt: "Once upon a time", max_tokens: 64 } };
const ABOUT = {
  "/v1/chat/completions": "Answer a conversation, as OpenAI's API does.",
  "/v1/completions": "Continue a text, as OpenAI's API does.",
  "/v1/messages": "Answer a conversation, as Anthropic's API does.",
  "/v1/responses": "Answer a conversation, as OpenAI's Responses API does.",
  "/v1/embeddings": "Return the embeddings of texts.",
  "/v1/models": "List the models that the server runs.",
  "/generate": "Continue a text, with the text and its latency in one flat object.",
  "/tokenize": "Return the tokens of a text or of a conversation.",
  "/detokenize": "Return the text of tokens.",
  "/version": "Return the version of the server.",
};

// Return the name that a schema refers to, or null.
const referred = (schema) => schema?.$ref?.split("/").pop() ?? null;
const anchor = (method, path) => `${method}-${path}`.replace(/[^a-z0-9]+/gi, "-").replace(/-$/, "");

function reference(name) {
  const link = make("a", "", name);
  link.href = `#object-${name}`;
  return link;
}

// Return the type of a schema as text and links, such as "list of integer".
function typeOf(schema) {
  if (referred(schema)) return [reference(referred(schema))];
  if (schema.anyOf) {
    const kinds = schema.anyOf.filter((branch) => branch.type !== "null");
    return kinds.flatMap((branch, index) => [...(index ? [" or "] : []), ...typeOf(branch)]);
  }
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" or ")];
  if (schema.type === "array") return schema.items ? ["list of ", ...typeOf(schema.items)] : ["list"];
  if (schema.type === "object" && schema.additionalProperties?.type) return ["object of ", ...typeOf(schema.additionalProperties)];
  return [schema.type ?? "any"];
}

// Return a number as text. Those beyond 2**53 are not exact in JavaScript.
const asNumber = (number) => (Number.isSafeInteger(number) || Math.abs(number) < 1e6 ? `${number}` : `about ${number.toPrecision(3)}`);

// Return the limits of a schema and of its alternatives as text.
function limitsOf(schema) {
  const found = [];
  for (const one of schema.anyOf ?? [schema]) {
    if (one.minimum !== undefined) found.push(`from ${asNumber(one.minimum)}`);
    if (one.exclusiveMinimum !== undefined) found.push(`above ${asNumber(one.exclusiveMinimum)}`);
    if (one.maximum !== undefined) found.push(`to ${asNumber(one.maximum)}`);
    if (one.minLength !== undefined) found.push(`${one.minLength} to ${one.maxLength ?? "any number of"} characters`);
    if (one.minItems !== undefined) found.push(`at least ${one.minItems} item${one.minItems === 1 ? "" : "s"}`);
  }
  return found.join(" ");
}

function fieldTable(schema, name) {
  const required = new Set(schema.required ?? []);
  const names = Object.keys(schema.properties ?? {}).sort((a, b) => required.has(b) - required.has(a));
  if (!names.length) return make("p", "quiet", "Any object.");
  const rows = names.map((field) => {
    const described = schema.properties[field];
    const first = make("td", "", make("code", "", field));
    if (required.has(field)) first.append(" ", make("span", "needed", "required"));
    const fallback = described.default === undefined || described.default === null ? "" : JSON.stringify(described.default);
    return make("tr", "", first, make("td", "", ...typeOf(described)), make("td", "", limitsOf(described)), make("td", "", fallback));
  });
  const head = make("tr", "", ...["Field", "Type", "Limits", "Default"].map((title) => make("th", "", title)));
  for (const cell of head.children) cell.scope = "col";
  const box = make("div", "fields", make("table", "", make("thead", "", head), make("tbody", "", ...rows)));
  return scrollable(box, `Fields of ${name}`);
}

// Let the keyboard reach an element that may scroll.
function scrollable(element, name) {
  element.tabIndex = 0;
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", name);
  return element;
}

function exampleBody(path, schema) {
  if (EXAMPLES[path]) return EXAMPLES[path];
  return Object.fromEntries((schema.required ?? []).map((name) => [name, SAMPLES[name] ?? null]));
}

function curl(method, path, body) {
  const parts = ["curl"];
  if (method !== "get") parts.push(`-X ${method.toUpperCase()}`);
  parts.push(new URL(`.${path}`, location.href).href);
  if (storedKey()) parts.push('-H "Authorization: Bearer $QUIRE_API_KEY"');
  if (body) parts.push(`-H "Content-Type: application/json" -d '${body.replaceAll("'", "'\\''")}'`);
  return parts.join(" ");
}

function section(method, path, operation, schemas) {
  const name = `${method.toUpperCase()} ${path}`;
  const element = make("article", "operation", make("h2", "", make("span", "method", method), path));
  element.id = anchor(method, path);
  const about = operation.description || ABOUT[path];
  if (about) element.append(make("p", "", about));
  const body = operation.requestBody?.content["application/json"].schema;
  const request = body && (schemas[referred(body)] ?? body);
  if (request) {
    const details = make("details", "", make("summary", "", `Fields of the request (${Object.keys(request.properties ?? {}).length})`));
    details.append(fieldTable(request, name));
    element.append(details);
  }
  const answer = operation.responses["200"].content;
  const kinds = Object.entries(answer).flatMap(([type, { schema }], index) => [
    index ? ", or " : "",
    ...(referred(schema) ? [reference(referred(schema)), " as "] : []),
    make("code", "", type),
  ]);
  element.append(make("p", "", "Answer: ", ...kinds, "."), tryForm(method, path, operation, request));
  return element;
}

// Return a form that sends the request and shows the answer as it comes.
function tryForm(method, path, operation, request) {
  const details = make("details", "try", make("summary", "", "Try it"));
  const form = details.appendChild(make("form", ""));
  const places = (operation.parameters ?? []).map(({ name }) => {
    const field = make("input");
    field.name = name;
    field.required = true;
    form.append(make("label", "", `${name} `, field));
    return field;
  });
  let body = null;
  if (request) {
    body = make("textarea", "", JSON.stringify(exampleBody(path, request), null, 1));
    body.rows = 7;
    body.spellcheck = false;
    form.append(make("label", "", "Body (JSON)", body));
  }
  const target = () => places.reduce((found, { name, value }) => found.replace(`{${name}}`, encodeURIComponent(value)), path);
  const result = scrollable(make("pre"), `Answer of ${path}`);
  result.hidden = true;
  const copy = copyButton(() => curl(method, target(), body?.value));
  copy.textContent = "Copy as curl";
  const send = make("button", "plain", "Send");
  form.append(make("div", "actions", send, copy));
  details.append(result);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    result.hidden = false;
    result.classList.remove("wrong");
    result.textContent = "…";
    send.disabled = true;
    try {
      await show(result, method, target(), body);
    } catch (problem) {
      result.classList.add("wrong");
      result.textContent = problem instanceof ApiProblem ? `${problem.status || ""} ${problem.message}`.trim() : problem.message;
    }
    send.disabled = false;
  });
  return details;
}

async function show(result, method, path, body) {
  let parsed;
  try {
    parsed = body ? JSON.parse(body.value) : undefined;
  } catch (problem) {
    throw new Error(`Not sent: the body is not valid JSON: ${problem.message}`);
  }
  const response = await api(path.slice(1), { method: method.toUpperCase(), body: parsed });
  if (response.headers.get("content-type")?.startsWith("text/event-stream")) {
    result.textContent = "";
    for await (const { data } of events(response)) {
      if (result.textContent.length < MAX_SHOWN) result.append(`${data}\n`);
    }
    return;
  }
  const text = await response.text();
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    // such as metrics, which are text
  }
  result.textContent = (shown || `${response.status} without a body`).slice(0, MAX_SHOWN);
}

function draw(description) {
  const { paths, components } = description;
  const schemas = components.schemas;
  $("contents").replaceChildren();
  $("operations").replaceChildren();
  for (const [path, operations] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const page = section(method, path, operation, schemas);
      const link = make("a", "", make("span", "method", method), make("span", "", path));
      link.href = `#${page.id}`;
      $("contents").append(make("li", "", link));
      $("operations").append(page);
    }
  }
  $("schemas").replaceChildren($("schemas-title"));
  for (const [name, schema] of Object.entries(schemas)) {
    const element = make("article", "schema", make("h3", "", name), schema.description ? make("p", "", schema.description) : "");
    element.id = `object-${name}`;
    element.append(fieldTable(schema, name));
    $("schemas").append(element);
  }
  $("schemas").hidden = false;
  $("model").textContent = `${description.info.title} ${description.info.version}`;
  $("state").textContent = "";
  filter();
  document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

// Show the routes whose path, description or fields contain the text to find.
function filter() {
  const wanted = $("find").value.trim().toLowerCase();
  let shown = 0;
  for (const link of $("contents").querySelectorAll("a")) {
    const page = document.getElementById(link.hash.slice(1));
    page.hidden = link.parentElement.hidden = !page.textContent.toLowerCase().includes(wanted);
    shown += !page.hidden;
  }
  $("state").textContent = shown ? "" : `No route contains “${wanted}”.`;
}

async function load() {
  try {
    draw(await (await api("openapi.json")).json());
  } catch (problem) {
    $("state").replaceChildren(problem.message, " ", button("plain", "Try again", load));
  }
}

async function start() {
  startTheme(() => {});
  $("find").addEventListener("input", filter);
  try {
    await startKey(load);
  } catch (problem) {
    $("state").replaceChildren(problem.message, " ", button("plain", "Try again", () => location.reload()));
    return;
  }
  if (keyIsMissing()) $("state").textContent = "This server needs an API key. Enter it at the top right.";
  else load();
}

start();
