// A table of requests whose rows are updated in place. Updating hundreds of rows four times a second must be cheap, so
// columns have fixed widths and only visible rows are updated.

import { count, duration, requestColour } from "./draw.js";
import { term } from "./terms.js";

const REASONS = {
  slots: "all slots of the batch are in use",
  latency: "more requests would miss the latency target",
  blocks: "not enough free blocks",
  tokens: "the token budget of the step is used up",
  batch: "the previous batch has not ended (static batching)",
  results: "preempted; its last step is in flight",
  grammar: "its grammar is being compiled",
  loading: "its blocks are on their way",
  new: "has just arrived",
  turn: "other requests are ahead",
};
const SPARE_ROWS = 8; // updated above and below the visible rows

const WINDOW_MS = 2000; // tokens per second are averaged over this time

// Columns: title, its term, classes, width in rem (0: the remaining width), text.
const ID = ["Request", "request", "words id", 5, (r) => r.id];
const CLIENT = ["Key", "client", "words key minor", 5, (r) => r.client];
const PROMPT = ["Prompt", "prompt", "", 4.2, (r) => count(r.prompt)];
const AGE = ["Age", "age", "", 4.6, (r) => (r.age_s < 60 ? `${r.age_s.toFixed(1)} s` : duration(r.age_s))];
const PREEMPTED = ["Preempted", "preempted", "minor", 5.4, (r) => (r.preemptions ? count(r.preemptions) : "")];
const RUNNING = [
  ID, CLIENT,
  ["State", "state", "words", 4.4, (r) => r.state],
  PROMPT,
  ["Cached", "cached", "", 4.2, (r) => (r.cached ? count(r.cached) : "")],
  ["Answer", "answer", "answer", 0, (r) => `${count(r.generated)} / ${count(r.limit)}`],
  ["Tokens/s", "speed", "", 4.6, (r) => (r.speed === null ? "" : r.speed < 10 ? r.speed.toFixed(1) : count(Math.round(r.speed)))],
  ["Blocks", "blocks", "", 3.8, (r) => count(r.blocks)],
  AGE, PREEMPTED,
];
const WAITING = [ID, CLIENT, PROMPT, AGE, ["Waiting because", "waiting-for", "words", 0, (r) => REASONS[r.state] ?? r.state], PREEMPTED];

// The speed of each request, from the tokens that it had in the latest states.
class Speeds {
  constructor() {
    this.past = new Map(); // by request: { at, generated } of the states within the window
  }

  // Set the `speed` of `requests`, in tokens per second; null until there are two states of a request.
  measure(requests, now = performance.now()) {
    const past = new Map();
    for (const request of requests) {
      const seen = [...(this.past.get(request.id) ?? []), { at: now, generated: request.generated }];
      while (seen.length > 2 && now - seen[0].at > WINDOW_MS) seen.shift();
      const seconds = (now - seen[0].at) / 1000;
      request.speed = seconds > 0.2 ? (request.generated - seen[0].generated) / seconds : null;
      past.set(request.id, seen);
    }
    this.past = past;
  }
}

export class RequestTable {
  constructor(table, counter, running, select) {
    Object.assign(this, { table, counter, running, selectRequest: select, rows: new Map(), selected: null });
    this.columns = running ? RUNNING : WAITING;
    this.speeds = new Speeds();
    const head = table.createTHead().insertRow();
    for (const [name, key, className, width] of this.columns) {
      const cell = head.appendChild(document.createElement("th"));
      cell.append(term(Object.assign(document.createElement("span"), { textContent: name }), key));
      cell.className = className.replace("id", "");
      cell.scope = "col";
      if (width) cell.style.width = `${width}rem`;
    }
    table.parentElement.addEventListener("scroll", () => this.refresh());
    this.body = table.createTBody();
    this.body.addEventListener("click", (event) => this.toggle(event.target.closest("tr")));
    this.body.addEventListener("keydown", (event) => this.key(event));
    this.empty = document.createElement("tr");
    const note = this.empty.appendChild(document.createElement("td"));
    note.className = "none";
    note.colSpan = this.columns.length;
    note.textContent = running ? "No running requests." : "No waiting requests.";
    this.body.append(this.empty);
  }

  show(state) {
    const requests = this.running ? state.running : state.waiting;
    this.speeds.measure(requests);
    const total = this.running ? state.stats.load.running : state.stats.load.waiting;
    this.counter.textContent = total > requests.length ? `${count(total)}, the first ${count(requests.length)}:` : count(total);
    this.empty.hidden = requests.length > 0;
    const now = new Set(requests.map((request) => request.id));
    for (const id of this.rows.keys()) if (!now.has(id)) this.remove(id);
    let place = this.body.firstElementChild;
    for (const request of requests) {
      const row = this.rows.get(request.id) ?? this.make(request);
      row.request = request;
      if (row.element === place) place = place.nextElementSibling;
      else this.body.insertBefore(row.element, place);
    }
    this.refresh();
    this.table.classList.toggle("keys", requests.some((request) => request.client));
    this.reach();
  }

  make(request) {
    const element = document.createElement("tr");
    element.dataset.id = request.id;
    element.tabIndex = -1;
    const cells = this.columns.map(([, , className]) => {
      const cell = element.insertCell();
      cell.className = className;
      if (className === "answer") cell.append(document.createElement("b"));
      return cell.appendChild(new Text());
    });
    const row = { element, cells, slot: null };
    row.mark = document.createElement("i");
    cells[0].before(row.mark);
    row.bar = element.querySelector("b");
    this.rows.set(request.id, row);
    this.fill(row, request); // also if not visible, so that the browser's search finds it
    element.setAttribute("aria-selected", request.id === this.selected);
    return row;
  }

  // Update the visible rows.
  refresh() {
    const first = this.body.firstElementChild;
    const { scrollTop, clientHeight } = this.table.parentElement;
    if (!clientHeight || first === this.empty) return;
    this.height ??= first.offsetHeight;
    const from = Math.max(0, Math.floor(scrollTop / this.height) - SPARE_ROWS);
    const until = Math.ceil((scrollTop + clientHeight) / this.height) + SPARE_ROWS;
    for (let index = from; index < until; index++) {
      const row = this.rows.get(this.body.children[index]?.dataset.id);
      if (!row) return;
      this.fill(row, row.request);
    }
  }

  fill(row, request) {
    this.columns.forEach(([, , , , value], index) => {
      const text = value(request);
      if (row.cells[index].data !== text) row.cells[index].data = text;
    });
    if (row.bar) row.bar.style.backgroundSize = `${(100 * request.generated) / (request.limit || 1)}% 100%`;
    if (row.slot !== request.slot) {
      row.slot = request.slot;
      row.mark.style.background = request.slot < 0 ? "" : `var(--${requestColour(request.slot)})`;
    }
  }

  remove(id) {
    const { element } = this.rows.get(id);
    if (element === document.activeElement) (element.nextElementSibling ?? element.previousElementSibling)?.focus();
    element.remove();
    this.rows.delete(id);
  }

  // Tab reaches one row: the selected one, otherwise the first.
  reach() {
    const wanted = this.rows.get(this.selected)?.element ?? this.body.firstElementChild;
    if (this.body.contains(document.activeElement) || this.reachable === wanted) return;
    if (this.reachable) this.reachable.tabIndex = -1;
    this.reachable = wanted;
    if (wanted) wanted.tabIndex = 0;
  }

  key(event) {
    const row = event.target.closest("tr");
    const next = { ArrowDown: row?.nextElementSibling, ArrowUp: row?.previousElementSibling }[event.key];
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.toggle(row);
    } else if (next?.dataset.id) {
      event.preventDefault();
      next.focus();
    }
  }

  toggle(row) {
    if (row?.dataset.id) this.selectRequest(row.dataset.id === this.selected ? null : row.dataset.id);
  }

  select(id) {
    this.selected = id;
    for (const [name, row] of this.rows) row.element.setAttribute("aria-selected", name === id);
    this.reach();
  }
}
