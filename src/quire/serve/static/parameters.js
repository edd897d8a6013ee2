// The form of parameters. Empty fields are not sent, so the server's defaults apply. A wrong field blocks sending.

import { storedKey } from "./api.js";
import { make } from "./dom.js";

const STORE = "quire-parameters";
export const TEXT_TOKENS = 512; // the default of /v1/completions is 16; that of chat is the rest of the context
const ALTERNATIVES = 5; // per token, beside its log-probability
const form = document.getElementById("parameters");
const numbers = [...form.querySelectorAll("input[type=number]")];
const problems = new Map(); // field name to what is wrong with it

export function startParameters(changed) {
  for (const [name, value] of Object.entries(stored())) {
    const field = form.elements[name];
    if (field?.type === "checkbox") field.checked = true;
    else if (field) field.value = value;
  }
  for (const input of [...numbers, form.elements.schema]) {
    const note = make("span", "wrong-value");
    note.setAttribute("aria-hidden", "true"); // not a part of the label's text, but of the description
    note.id = `wrong-${input.name}`;
    input.setAttribute("aria-describedby", note.id);
    input.after(note);
  }
  const update = () => {
    check();
    changed();
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", update);
  document.getElementById("defaults").addEventListener("click", () => {
    form.reset();
    update();
  });
  check();
  if (matchMedia("(max-width: 75rem)").matches) document.getElementById("settings").open = false;
}

function stored() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}

function check() {
  const values = Object.fromEntries(new FormData(form));
  localStorage.setItem(STORE, JSON.stringify(values));
  for (const part of form.querySelectorAll("[data-kind]")) part.hidden = part.dataset.kind !== values.kind;
  form.elements.max_tokens.placeholder = values.kind === "text" ? TEXT_TOKENS : "all that fit";
  for (const input of numbers) note(input, numberProblem(input));
  note(form.elements.schema, schemaProblem());
}

function note(input, problem) {
  document.getElementById(`wrong-${input.name}`).textContent = problem ?? "";
  input.setAttribute("aria-invalid", problem !== null);
  if (problem === null) problems.delete(input.name);
  else problems.set(input.name, problem);
}

function numberProblem(input) {
  const name = input.labels[0].firstChild.textContent.trim();
  if (input.validity.badInput) return `${name} must be a number.`;
  if (input.value === "") return null;
  const value = Number(input.value);
  const [low, high] = [Number(input.min), Number(input.max)];
  if (input.step === "1" && !Number.isInteger(value)) return `${name} must be a whole number, got ${input.value}.`;
  const open = input.dataset.above !== undefined; // the lower bound itself is not allowed
  if (value > high || value < low || (open && value === low)) {
    const range = open ? `above ${low} and at most ${high}` : `between ${low} and ${high}`;
    return `${name} must be ${range}, got ${input.value}.`;
  }
  return null;
}

function schemaProblem() {
  let schema;
  try {
    schema = readSchema();
  } catch (problem) {
    return `JSON schema is not valid JSON: ${problem.message}`;
  }
  return schema === null || (typeof schema === "object" && !Array.isArray(schema)) ? null : "JSON schema must be an object, { ... }.";
}

function readSchema() {
  const text = form.elements.schema.value.trim();
  return text ? JSON.parse(text) : null;
}

// Return { field, reason } of the first wrong field, or null.
export function firstProblem() {
  const [found] = problems;
  return found ? { field: form.elements[found[0]], reason: found[1] } : null;
}

// Return { kind: "chat" or "text", system: the system message, fields: further fields of the request }. No field may be
// wrong.
export function readParameters() {
  const fields = {};
  for (const { name, value } of numbers) if (value !== "") fields[name] = Number(value);
  if (form.elements.stop.value) fields.stop = [form.elements.stop.value];
  const schema = readSchema();
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const kind = form.elements.kind.value;
  if (form.elements.logprobs.checked) {
    Object.assign(fields, kind === "chat" ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES });
  }
  return { kind, system: form.elements.system.value.trim(), fields };
}

export function setSystem(text) {
  form.elements.system.value = text;
  check();
}

export function asCurl({ path, body }) {
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const key = storedKey() ? ' -H "Authorization: Bearer $QUIRE_API_KEY"' : "";
  return `curl ${new URL(path, location.href)} -H "Content-Type: application/json"${key} -d '${quoted}'`;
}
