// The form of parameters. Empty fields are not sent, so the server's defaults apply.

import { storedKey } from "./api.js";

const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];
const STORE = "quire-parameters";
const form = document.getElementById("parameters");
const state = document.getElementById("schema-state");

export function startParameters() {
  const stored = JSON.parse(localStorage.getItem(STORE) ?? "{}");
  for (const [name, value] of Object.entries(stored)) {
    if (form.elements[name]) form.elements[name].value = value;
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", update);
  update();
  if (matchMedia("(max-width: 60rem)").matches) document.getElementById("settings").open = false;
}

function update() {
  const values = Object.fromEntries(new FormData(form));
  localStorage.setItem(STORE, JSON.stringify(values));
  for (const part of form.querySelectorAll("[data-kind]")) part.hidden = part.dataset.kind !== values.kind;
  const problem = schemaProblem();
  state.textContent = problem ?? (values.schema.trim() ? "The answer will follow this schema." : "");
  state.classList.toggle("wrong", problem !== null);
}

function schemaProblem() {
  try {
    readSchema();
    return null;
  } catch (problem) {
    return `Not valid JSON, so it is not sent: ${problem.message}`;
  }
}

function readSchema() {
  const text = form.elements.schema.value.trim();
  return text ? JSON.parse(text) : null;
}

// Return { kind: "chat" or "text", system: the system message, fields: further fields of the request }.
export function readParameters() {
  const fields = {};
  for (const name of NUMBERS) {
    const input = form.elements[name];
    if (input.value !== "" && input.validity.valid) fields[name] = Number(input.value);
  }
  if (form.elements.stop.value) fields.stop = [form.elements.stop.value];
  const schema = schemaProblem() === null ? readSchema() : null;
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return { kind: form.elements.kind.value, system: form.elements.system.value.trim(), fields };
}

export function asCurl({ path, body }) {
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const key = storedKey() ? ' -H "Authorization: Bearer $QUIRE_API_KEY"' : "";
  return `curl ${new URL(path, location.href)} -H "Content-Type: application/json"${key} -d '${quoted}'`;
}
