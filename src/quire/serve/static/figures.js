// The row of statistics: load, throughput, and the use of the KV cache.

import { count } from "./draw.js";
import { term } from "./terms.js";

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
    this.put("running", "Running", count(load.running));
    this.put("waiting", "Waiting", count(load.waiting));
    this.put("generated", "Generated", count(Math.round(speed("generated_tokens"))), "tokens/s");
    this.put("computed", "Computed", count(Math.round(speed("computed_tokens"))), "tokens/s");
    this.put("blocks-used", "Blocks in use", count(used), `of ${count(blocks)} · ${Math.round((100 * used) / blocks)} %`);
    this.put("shared-blocks", "Shared", count(shared), "blocks");
    this.put("evictable-blocks", "Evictable", count(cached), "blocks");
    if (stats.snapshot_rows) this.put("snapshots", "State snapshots", count(stats.snapshots), `of ${count(stats.snapshot_rows)}`);
    const seen = totals.prompt_tokens;
    this.put("cache-hits", "Prefix cache hits", seen ? `${((100 * totals.cached_tokens) / seen).toFixed(1)} %` : "–");
    if (totals.draft_rows) {
      const shares = totals.accepted_at.map((accepted) => Math.round((100 * accepted) / totals.draft_rows));
      const by = `of ${count(totals.draft_tokens)} · by position ${shares.join(", ")} %`;
      this.put("acceptance", "Drafts accepted", `${((100 * totals.accepted_tokens) / totals.draft_tokens).toFixed(1)} %`, by);
      this.put("accepted-length", "Accepted length", (1 + totals.accepted_tokens / totals.draft_rows).toFixed(2), "tokens");
    }
    this.put("preemptions", "Preemptions", count(totals.preemptions));
    this.put("evictions", "Evictions", count(totals.evictions ?? 0));
  }

  put(key, label, value, unit = "") {
    if (!this.values[key]) {
      const pair = this.list.appendChild(document.createElement("div"));
      const name = term(pair.appendChild(document.createElement("dt")), key);
      name.textContent = label;
      const figure = pair.appendChild(document.createElement("dd"));
      this.values[key] = [figure.appendChild(new Text()), figure.appendChild(document.createElement("small"))];
    }
    const [text, small] = this.values[key];
    if (text.data !== value) text.data = value;
    const suffix = unit && ` ${unit}`;
    if (small.textContent !== suffix) small.textContent = suffix;
  }
}
