// A table of requests, by rows that stay where they are while their numbers change.

import { count, duration, requestColour } from "./draw.js";

const REASONS = {
  slots: "all slots of the batch are taken",
  pages: "not enough free pages",
  tokens: "the step's token budget is used up",
  batch: "the batch before it must end (static batching)",
  results: "preempted; its last step is in flight",
  grammar: "its grammar is being compiled",
  new: "has just come",
  turn: "others are before it",
};
const ID = ["Request", "words id", (r) => r.id];
const CLIENT = ["Key", "words key minor", (r) => r.client];
const PROMPT = ["Prompt", "", (r) => count(r.prompt)];
const AGE = ["Age", "", (r) => (r.age_s < 60 ? `${r.age_s.toFixed(1)} s` : duration(r.age_s))];
const PREEMPTED = ["Preempted", "minor", (r) => (r.preemptions ? count(r.preemptions) : "")];
const RUNNING = [
  ID, CLIENT,
  ["State", "words", (r) => r.state],
  PROMPT,
  ["Cached", "", (r) => (r.cached ? count(r.cached) : "")],
  ["Answer", "answer", (r) => `${count(r.generated)} / ${count(r.limit)}`],
  ["Pages", "", (r) => count(r.pages)],
  AGE, PREEMPTED,
];
const WAITING = [ID, CLIENT, PROMPT, AGE, ["Waits, because", "words", (r) => REASONS[r.state] ?? r.state], PREEMPTED];

export class RequestTable {
  constructor(table, counter, running, select) {
    Object.assign(this, { table, counter, running, selectRequest: select, rows: new Map(), selected: null });
    this.columns = running ? RUNNING : WAITING;
    const head = table.createTHead().insertRow();
    for (const [name, className] of this.columns) {
      const cell = head.appendChild(document.createElement("th"));
      cell.textContent = name;
      cell.className = className.replace("id", "");
      cell.scope = "col";
    }
    this.body = table.createTBody();
    this.body.addEventListener("click", (event) => this.toggle(event.target.closest("tr")));
    this.body.addEventListener("keydown", (event) => this.key(event));
    this.empty = document.createElement("tr");
    const note = this.empty.appendChild(document.createElement("td"));
    note.className = "none";
    note.colSpan = this.columns.length;
    note.textContent = running ? "Nobody runs." : "Nobody waits.";
    this.body.append(this.empty);
  }

  show(state) {
    const requests = this.running ? state.running : state.waiting;
    const total = this.running ? state.stats.load.running : state.stats.load.waiting;
    this.counter.textContent = total > requests.length ? `${count(total)}, the first ${count(requests.length)}:` : count(total);
    this.empty.hidden = requests.length > 0;
    const gone = new Set(this.rows.keys());
    requests.forEach((request, index) => {
      gone.delete(request.id);
      const row = this.rows.get(request.id) ?? this.make(request);
      if (this.body.children[index] !== row.element) this.body.insertBefore(row.element, this.body.children[index]);
      this.fill(row, request);
    });
    for (const id of gone) this.remove(id);
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
      if (className === "answer") cell.append(document.createElement("progress"));
      return cell.appendChild(new Text());
    });
    const row = { element, cells, slot: null };
    row.mark = document.createElement("i");
    cells[0].before(row.mark);
    row.bar = element.querySelector("progress");
    this.rows.set(request.id, row);
    element.setAttribute("aria-selected", request.id === this.selected);
    return row;
  }

  fill(row, request) {
    this.columns.forEach(([, , value], index) => {
      const text = value(request);
      if (row.cells[index].data !== text) row.cells[index].data = text;
    });
    if (row.bar) {
      row.bar.max = request.limit || 1;
      row.bar.value = request.generated;
    }
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

  // One row can be reached with Tab: the selected one, or else the first.
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
