// The live view: its parts, and the event stream that feeds them. Data is collected only while the page is open.

import { ApiProblem, api, events } from "./api.js";
import { Figures } from "./figures.js";
import { BlockMap } from "./blocks.js";
import { RequestTable } from "./requests.js";
import { StepBars } from "./steps.js";

const RETRY_MS = [500, 1000, 2000, 5000, 10000];
const SILENT_MS = 40_000; // the server writes at least every 15 s
const $ = (id) => document.getElementById(id);

export class LiveView {
  constructor() {
    const select = (id) => this.select(id);
    this.figures = new Figures($("figures"));
    this.steps = new StepBars($("steps-canvas"), $("steps-readout"));
    this.blocks = new BlockMap($("blocks-canvas"), $("blocks-readout"), select);
    this.tables = [
      new RequestTable($("running"), $("running-count"), true, select),
      new RequestTable($("waiting"), $("waiting-count"), false, select),
    ];
    this.parts = [this.figures, this.blocks, ...this.tables];
    this.visible = this.paused = false;
    this.stream = null; // the AbortController of the open event stream
    this.heard = null; // the time of the last event
    $("try-now").addEventListener("click", () => this.reconnect());
    $("pause").addEventListener("click", () => this.pause(!this.paused));
    document.addEventListener("keydown", (event) => {
      const typing = /INPUT|TEXTAREA/.test(event.target.tagName);
      if (this.visible && event.key === "p" && !typing && !event.ctrlKey && !event.metaKey) this.pause(!this.paused);
      if (this.visible && event.key === "Escape") this.select(null);
    });
    new ResizeObserver(() => this.redraw()).observe($("live"));
  }

  setVisible(visible) {
    if (visible === this.visible) return;
    this.visible = visible;
    this.reconnect();
    if (visible) this.redraw();
  }

  // While paused, the view keeps its last state and the event stream is closed.
  pause(paused) {
    this.paused = paused;
    $("pause").setAttribute("aria-pressed", paused);
    $("pause").textContent = paused ? "Resume" : "Pause";
    this.reconnect();
  }

  reconnect() {
    this.stream?.abort();
    this.stream = null;
    if (!this.visible || this.paused) {
      this.lost(null);
      return this.say(this.paused ? "Paused" : "");
    }
    this.stream = new AbortController();
    this.follow(this.stream.signal);
  }

  async follow(signal) {
    for (let failures = 0; !signal.aborted; failures++) {
      let problem = new ApiProblem("The server has closed the connection.", 0);
      try {
        if (!failures) this.say("Connecting …");
        this.steps.restart();
        for await (const { event, data } of events(await api("live/events", { signal }), SILENT_MS)) {
          failures = 0;
          this.heard = new Date();
          this.take(event, JSON.parse(data));
          this.lost(null);
        }
      } catch (found) {
        problem = found;
      }
      if (signal.aborted) return;
      const final = problem.status === 401 || problem.status === 404;
      const wait_ms = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
      this.lost(problem instanceof ApiProblem ? problem.message : "The connection was lost.", final ? null : wait_ms);
      if (final) return;
      await new Promise((resolve) => setTimeout(resolve, wait_ms));
    }
  }

  // Say that there is no connection and since when the page shows an old state; `message` null: the connection is back.
  lost(message, wait_ms = null) {
    $("gone").hidden = message === null;
    $("live").classList.toggle("stale", message !== null);
    if (message === null) return;
    this.say("Not connected");
    const since = this.heard ? ` Everything below is as it was at ${this.heard.toLocaleTimeString("en-GB")}.` : " There is nothing to show yet.";
    const again = wait_ms === null ? "" : ` The page tries again every ${wait_ms <= 1000 ? "second" : `${wait_ms / 1000} s`}.`;
    const text = message + since + again;
    if ($("gone-text").textContent !== text) $("gone-text").textContent = text;
  }

  take(event, data) {
    if (event === "end") throw new ApiProblem(data.error.message, 500);
    if (event === "steps") return this.steps.add(data);
    this.say(data.stats.load.running || data.stats.load.waiting ? "Live" : "Live, idle");
    for (const part of this.parts) part.show(data);
    this.steps.draw();
  }

  select(id) {
    this.blocks.select(id);
    for (const table of this.tables) table.select(id);
  }

  redraw() {
    this.steps.draw(true);
    this.blocks.draw();
  }

  say(text) {
    if ($("connection").textContent !== text) $("connection").textContent = text;
  }
}
