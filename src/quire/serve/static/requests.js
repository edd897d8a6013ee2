// A table of requests whose rows are updated in place. Updating hundreds of rows four times a second must be cheap, so
// columns have fixed widths and only visible rows are updated.

import { count, duration, requestColour } from "./draw.js";

const REASONS = {
  slots: "all slots of the batch are in use",
  blocks: "not enough free blocks",
  tokens: "the token budget of the step is used up",
  batch: "the previous batch has not ended (static batching)",
  results: "preempted; its last step is in flight",
  grammar: "its grammar is being compiled",
  new: "has just arrived",
  turn: "other requests are ahead",
};
const SPARE_ROWS = 8; // updated above and below the visible rows

// Columns: title, classes, width in rem (0: the remaining width), text.
const ID = ["Request", "words id", 5, (r) => r.id];
const CLIENT = ["Key", "words key minor", 5, (r) => r.client];
const PROMPT = ["Prompt", "", 4.2, (r) => count(r.prompt)];
const AGE = ["Age", "", 4.6, (r) => (r.age_s < 60 ? `${r.age_s.toFixed(1)} s` : duration(r.age_s))];
const PREEMPTED = ["Preempted", "minor", 5.4, (r) => (r.preemptions ? count(r.preemptions) : "")];
const RUNNING = [
  ID, CLIENT,
  ["State", "words", 4.4, (r) => r.state],
  PROMPT,
  ["Cached", "", 4.2, (r) => (r.cached ? count(r.cached) : "")],
  ["Answer", "answer", 0, (r) => `${count(r.generated)} / ${count(r.limit)}`],
  ["Blocks", "", 3.6, (r) => count(r.blocks)],
  AGE, PREEMPTED,
];
const WAITING = [ID, CLIENT, PROMPT, AGE, ["Waiting because", "words", 0, (r) => REASONS[r.state] ?? r.state], PREEMPTED];

export class RequestTable {
  constructor(table, counter, running, select) {
    Object.assign(this, { table, counter, running, selectRequest: select, rows: new Map(), selected: null });
    this.columns = running ? RUNNING : WAITING;
    const head = table.createTHead().insertRow();
    for (const [name, className, width] of this.columns) {
      const cell = head.appendChild(document.createElement("th"));
      cell.textContent = name;
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
    const cells = this.columns.map(([, className]) => {
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
    this.columns.forEach(([, , , value], index) => {
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
