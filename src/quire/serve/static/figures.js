// The row of statistics: load, throughput, and the use of the KV cache.

import { count } from "./draw.js";

const WINDOW_MS = 2000; // throughput is averaged over this time

export class Figures {
  constructor(list) {
    this.list = list;
    this.values = {};
    this.past = []; // { at, totals } of the latest states
  }

  show({ stats, shared_blocks: shared }) {
    const { load, totals, blocks, free_blocks: free, cached_blocks: cached } = stats;
    const now = performance.now();
    if (this.past.length && totals.steps < this.past.at(-1).totals.steps) this.past = []; // the engine was restarted
    this.past.push({ at: now, totals });
    while (this.past.length > 2 && now - this.past[0].at > WINDOW_MS) this.past.shift();
    const seconds = (now - this.past[0].at) / 1000;
    const speed = (name) => (seconds > 0.2 ? (totals[name] - this.past[0].totals[name]) / seconds : 0);
    const used = blocks - free;
    this.put("Running", count(load.running));
    this.put("Waiting", count(load.waiting));
    this.put("Generated", count(Math.round(speed("generated_tokens"))), "tokens/s");
    this.put("Computed", count(Math.round(speed("computed_tokens"))), "tokens/s");
    this.put("Blocks in use", count(used), `of ${count(blocks)} · ${Math.round((100 * used) / blocks)} %`);
    this.put("Shared", count(shared), "blocks");
    this.put("Evictable", count(cached), "blocks");
    const seen = totals.prompt_tokens;
    this.put("Prefix cache hits", seen ? `${((100 * totals.cached_tokens) / seen).toFixed(1)} %` : "–");
    this.put("Preemptions", count(totals.preemptions));
    this.put("Evictions", count(totals.evictions ?? 0));
  }

  put(label, value, unit = "") {
    if (!this.values[label]) {
      const pair = this.list.appendChild(document.createElement("div"));
      const name = pair.appendChild(document.createElement("dt"));
      name.textContent = label;
      const figure = pair.appendChild(document.createElement("dd"));
      this.values[label] = [figure.appendChild(new Text()), figure.appendChild(document.createElement("small"))];
    }
    const [text, small] = this.values[label];
    if (text.data !== value) text.data = value;
    const suffix = unit && ` ${unit}`;
    if (small.textContent !== suffix) small.textContent = suffix;
  }
}
