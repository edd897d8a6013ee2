// The block map: one cell per block of the KV cache, or per group of blocks if there are very many.

import { colours, count, REQUEST_COLOURS, requestColour, surface } from "./draw.js";

const SIZES = [18, 16, 14, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2]; // cell sizes to choose from, in pixels
const MAX_HEIGHT = 430; // pixels
const MARGIN = 6;
const [BLANK, FIRST_OWNER] = [0, 4]; // as in quire/core/live_state.py
const PLAIN = ["blank", "evictable", "shared", "others"];

export class BlockMap {
  constructor(canvas, readout, select) {
    Object.assign(this, { canvas, readout, selectRequest: select, cells: new Uint16Array(0), encoded: "" });
    Object.assign(this, { running: [], perCell: 1, blocks: 0, selected: null, cursor: null, columns: 1, size: 1 });
    canvas.addEventListener("mousemove", (event) => this.point(this.at(event.offsetX, event.offsetY)));
    canvas.addEventListener("mouseleave", () => this.point(null));
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("click", () => this.selectRequest(this.owner(this.cursor)?.id ?? null));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  show(state) {
    const slots = (requests) => requests.map((request) => request.slot).join();
    const same = state.blocks === this.encoded && slots(state.running) === slots(this.running);
    this.running = state.running;
    this.perCell = state.blocks_per_cell;
    this.blocks = state.stats.blocks;
    if (same) return this.describe();
    this.encoded = state.blocks;
    const bytes = Uint8Array.from(atob(state.blocks), (letter) => letter.charCodeAt(0));
    this.cells = new Uint16Array(bytes.buffer);
    this.draw();
  }

  select(id) {
    if (id === this.selected) return;
    this.selected = id;
    this.draw();
  }

  owner(cell) {
    return cell === null ? null : (this.running[this.cells[cell] - FIRST_OWNER] ?? null);
  }

  at(x, y) {
    const column = Math.floor((x - MARGIN) / this.size);
    const cell = Math.floor((y - MARGIN) / this.size) * this.columns + column;
    return column < 0 || column >= this.columns || cell < 0 || cell >= this.cells.length ? null : cell;
  }

  point(cell) {
    if (cell === this.cursor) return;
    this.cursor = cell;
    this.draw();
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (event.key === "Enter") this.selectRequest(this.owner(this.cursor)?.id ?? null);
    if (!move || !this.cells.length) return;
    event.preventDefault();
    const next = this.cursor === null ? 0 : this.cursor + move;
    if (next >= 0 && next < this.cells.length) this.point(next);
  }

  // Choose the largest cells with which the map fits into MAX_HEIGHT.
  arrange() {
    const width = this.canvas.parentElement.clientWidth - 2 - 2 * MARGIN;
    for (const size of SIZES) {
      this.size = size;
      this.columns = Math.max(1, Math.floor(width / size));
      this.rows = Math.ceil(this.cells.length / this.columns);
      if (this.rows * size <= MAX_HEIGHT) break;
    }
    const height = `${Math.max(1, this.rows) * this.size + 2 * MARGIN + 2}px`;
    if (this.canvas.style.height !== height) this.canvas.style.height = height;
  }

  draw() {
    if (!this.canvas.parentElement.clientWidth) return;
    this.arrange();
    const on = surface(this.canvas);
    if (!on) return;
    const names = [...PLAIN, "accent", "sheet", ...Array.from({ length: REQUEST_COLOURS }, (_, slot) => requestColour(slot))];
    const palette = colours(names);
    const { context } = on;
    const gap = this.size > 4 ? 1 : 0;
    const chosen = this.selected && this.running.findIndex((request) => request.id === this.selected) + FIRST_OWNER;
    const groups = new Map(); // cells by colour and opacity
    this.cells.forEach((value, cell) => {
      const name = PLAIN[value] ?? requestColour(this.running[value - FIRST_OWNER]?.slot ?? value);
      const faint = chosen >= FIRST_OWNER && value !== chosen && value !== BLANK;
      const key = faint ? `-${name}` : name;
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(cell);
    });
    for (const [key, cells] of groups) {
      context.globalAlpha = key.startsWith("-") ? 0.22 : 1;
      const name = key.replace(/^-/, "");
      context.fillStyle = palette[name];
      for (const cell of cells) context.fillRect(...this.corner(cell), this.size - gap, this.size - gap);
      if (name === "evictable" || name === "shared") this.hollow(context, cells, name, palette.sheet);
    }
    context.globalAlpha = 1;
    this.mark(context, palette.accent);
    this.describe();
  }

  // Distinguish states by shape too, if cells are large enough: evictable blocks are frames, shared ones have a dot in
  // the middle.
  hollow(context, cells, name, colour) {
    if (this.size < 7) return;
    const edge = name === "evictable" ? 1.5 : Math.floor((this.size - 1) / 2) - 1;
    context.globalAlpha = 1;
    context.fillStyle = colour;
    for (const cell of cells) {
      const [x, y] = this.corner(cell);
      const side = this.size - 1 - 2 * edge;
      context.fillRect(x + edge, y + edge, side, side);
    }
  }

  corner(cell) {
    return [MARGIN + (cell % this.columns) * this.size, MARGIN + Math.floor(cell / this.columns) * this.size];
  }

  mark(context, colour) {
    if (this.cursor === null || this.cursor >= this.cells.length) return;
    const [x, y] = this.corner(this.cursor);
    context.strokeStyle = colour;
    context.lineWidth = 2;
    context.strokeRect(x - 1.5, y - 1.5, this.size + 2, this.size + 2);
  }

  describe() {
    const several = this.perCell > 1 ? ` Each cell stands for ${this.perCell} blocks and shows the owner of one of them.` : "";
    let text = `${count(this.blocks)} blocks.${several} Hover over a cell or use the arrow keys for details; click or press Enter to select its request.`;
    if (this.cursor !== null && this.cursor < this.cells.length) {
      const value = this.cells[this.cursor];
      const first = this.cursor * this.perCell;
      const name = this.perCell > 1 ? `Blocks ${count(first)} to ${count(Math.min(this.blocks, first + this.perCell) - 1)}` : `Block ${count(first)}`;
      const states = ["blank", "evictable: free, but its content is still cached", "shared by several requests", "held by a request that is not listed"];
      text = `${name}: ${states[value] ?? `request ${this.owner(this.cursor)?.id ?? "not listed"}`}`;
    } else if (this.selected) {
      const index = this.running.findIndex((request) => request.id === this.selected);
      const request = this.running[index];
      if (request) {
        const own = this.cells.reduce((sum, value) => sum + (value === index + FIRST_OWNER), 0);
        const shared = this.perCell === 1 ? `, ${count(request.blocks - own)} of them shared` : "";
        text = `Request ${request.id} holds ${count(request.blocks)} blocks${shared}. Press Esc to deselect.`;
      }
    }
    if (this.readout.textContent !== text) this.readout.textContent = text;
    this.canvas.setAttribute("aria-label", `Map of ${this.blocks} blocks`);
  }
}
