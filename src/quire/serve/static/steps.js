// The step chart: a bar per step, the newest on the right, in three strips: prompt tokens, decode tokens, step time.
//
// The bars have equal widths, so the axis is not linear in time. It shows the time of day below the bars, and a gap with
// its length wherever the engine had nothing to do.

import { colours, count, duration, nice, surface } from "./draw.js";

const KEPT = 1024;
const PITCH = 4; // pixels from one bar to the next
const LEFT = 104;
const RIGHT = 10;
const GAP = 15; // pixels above each strip, with room for preemption marks
const AXIS = 18; // pixels below the strips, for the time of day
const PAUSE = 54; // pixels of a gap without steps
const PAUSE_S = 0.1; // shorter gaps are not shown
const TICK = 90; // pixels between two times of day, at least
const REASONS = {
  slots: "a slot", latency: "the latency target", blocks: "free blocks", tokens: "the token budget",
  batch: "the end of the batch",
  results: "results in flight", grammar: "a grammar", loading: "blocks from elsewhere",
};
const STRIPS = [
  { label: "Prompt", parts: [["prefill", (s) => s.prefill]], scale: (top) => count(top) },
  { label: "Decode", parts: [["decode", (s) => s.decode], ["drafts", (s) => s.drafts]], scale: (top) => count(top) },
  { label: "Time", parts: [["time", (s) => s.took_s * 1000]], scale: (top) => duration(top / 1000) },
];

// Return the top of the scale. A few outliers may exceed it, so that they do not flatten all other bars.
function highest(values) {
  const sorted = values.filter((value) => value > 0).toSorted((a, b) => a - b);
  const usual = sorted[Math.floor(0.97 * sorted.length)] ?? 0;
  return sorted.at(-1) > 4 * usual ? 1.5 * usual : (sorted.at(-1) ?? 0);
}

export class StepBars {
  constructor(canvas, readout) {
    Object.assign(this, { canvas, readout, steps: [], shown: [], chosen: null, colours: null, fresh: true });
    this.clock_s = null; // time of day minus the engine's clock; null until a step has just ended
    canvas.addEventListener("mousemove", (event) => this.choose(this.at(event.offsetX)));
    canvas.addEventListener("mouseleave", () => this.choose(null));
    canvas.addEventListener("blur", () => this.choose(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  // Expect the latest steps again, as they come at the start of a stream. The newest of them may have ended long ago.
  restart() {
    this.fresh = true;
  }

  add(steps) {
    const live = !this.fresh; // the newest of these steps has just ended
    const last = this.steps.at(-1);
    this.fresh = false;
    if (steps.length && last && steps[0].step <= last.step) {
      if (steps.some((step) => step.step === last.step && step.time_s === last.time_s)) {
        steps = steps.filter((step) => step.step > last.step);
      } else {
        this.steps = []; // the engine was restarted
        this.clock_s = null;
      }
    }
    for (const step of steps) {
      const before_s = this.steps.at(-1)?.end_s ?? step.time_s;
      step.end_s = Math.max(step.time_s, before_s) + step.took_s;
      step.idle_s = step.time_s - before_s;
      this.steps.push(step);
    }
    this.steps = this.steps.slice(-KEPT);
    if (steps.length && live) this.clock_s = Math.min(this.clock_s ?? Infinity, Date.now() / 1000 - steps.at(-1).end_s);
  }

  // Return the newest steps that fit, each with `x`, its left edge, oldest first.
  arrange(width) {
    const shown = [];
    let x = width - RIGHT;
    for (let index = this.steps.length - 1; index >= 0; index--) {
      const step = this.steps[index];
      x -= PITCH;
      if (x < LEFT) break;
      shown.push({ step, x });
      if (step.idle_s >= PAUSE_S) x -= PAUSE;
    }
    return shown.reverse();
  }

  // Return the step at pointer position x.
  at(x) {
    return this.shown.find((bar) => x >= bar.x && x < bar.x + PITCH)?.step ?? null;
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -KEPT, End: KEPT }[event.key];
    if (event.key === "Escape") this.choose(null);
    if (!move || !this.steps.length) return;
    event.preventDefault();
    const from = this.chosen ? this.steps.indexOf(this.chosen) : this.steps.length;
    const first = this.steps.length - this.shown.length;
    this.choose(this.steps[Math.min(this.steps.length - 1, Math.max(first, from + move))]);
  }

  choose(step) {
    if (step === this.chosen) return;
    this.chosen = step;
    this.draw();
  }

  draw(themed = false) {
    const on = surface(this.canvas);
    if (!on) return;
    if (themed || !this.colours) {
      this.colours = colours(["prefill", "decode", "drafts", "time", "preempted", "quiet", "line", "accent", "blank"]);
    }
    this.shown = this.arrange(on.width);
    document.getElementById("drafts-legend").hidden = !this.steps.some((step) => step.drafts);
    const each = (on.height - AXIS) / STRIPS.length;
    on.context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    STRIPS.forEach((strip, index) => this.strip(on, strip, this.shown, each * index + GAP, each - GAP - 6));
    this.gaps(on);
    this.axis(on);
    this.marks(on);
    this.describe(this.shown.map(({ step }) => step));
  }

  strip({ context, width }, { label, parts, scale }, shown, top, height) {
    const total = (step) => parts.reduce((sum, [, value]) => sum + value(step), 0);
    const bound = nice(Math.max(1, highest(shown.map(({ step }) => total(step)))));
    context.fillStyle = this.colours.quiet;
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillText(label, 10, top + height / 2);
    context.textAlign = "right";
    context.fillText(scale(bound), LEFT - 8, top);
    context.fillText("0", LEFT - 8, top + height);
    context.fillStyle = this.colours.line;
    context.fillRect(LEFT, top, width - LEFT - RIGHT, 1);
    context.fillRect(LEFT, top + height, width - LEFT - RIGHT, 1);
    const bottom = new Float64Array(shown.length);
    for (const [colour, value] of parts) {
      context.fillStyle = this.colours[colour];
      shown.forEach(({ step, x }, index) => {
        const tall = (value(step) / bound) * height;
        if (!tall) return;
        const high = Math.min(Math.max(1, tall), height - bottom[index]);
        context.fillRect(x, top + height - bottom[index] - high, PITCH - 1, high);
        if (tall > high + 1) context.clearRect(x, top + 4, PITCH - 1, 3); // a gap marks a bar that exceeds the scale
        bottom[index] += high;
      });
    }
  }

  // Mark where the engine had nothing to do, with the length of that time.
  gaps({ context, height }) {
    context.textAlign = "center";
    for (const { step, x } of this.shown) {
      if (step.idle_s < PAUSE_S || x - PAUSE < LEFT) continue;
      context.fillStyle = this.colours.blank;
      context.fillRect(x - PAUSE + 2, 2, PAUSE - 5, height - AXIS - 4);
      context.fillStyle = this.colours.quiet;
      context.fillText(duration(step.idle_s).replace(" min", ""), x - PAUSE / 2, (height - AXIS) / 2);
    }
  }

  // Write times below the bars: the time of day, or the time before the newest step if that is not known.
  axis({ context, width, height }) {
    context.fillStyle = this.colours.quiet;
    context.textAlign = "left";
    context.fillText(this.clock_s === null ? "Before the end" : "Clock", 10, height - AXIS / 2);
    context.textAlign = "center";
    let [last, free] = ["", width - 34]; // the last label; the next one must end left of `free`
    for (const { step, x } of this.shown.toReversed()) {
      const label = this.time(step);
      if (label === last || x + 30 > free || x < LEFT + 20) continue;
      context.fillRect(x + 1, height - AXIS - 2, 1, 4);
      context.fillText(label, x + 1, height - AXIS / 2 + 1);
      [last, free] = [label, x - TICK + 30];
    }
  }

  time(step) {
    if (this.clock_s === null) return duration(this.steps.at(-1).end_s - step.end_s);
    return new Date((step.end_s + this.clock_s) * 1000).toLocaleTimeString("en-GB");
  }

  marks({ context, height }) {
    for (const { step, x } of this.shown) {
      if (step.preempted) {
        context.fillStyle = this.colours.preempted;
        context.beginPath();
        context.moveTo(x - 3, 3);
        context.lineTo(x + 6, 3);
        context.lineTo(x + 1.5, 11);
        context.fill();
      }
      if (step === this.chosen) {
        context.strokeStyle = this.colours.accent;
        context.strokeRect(x - 1.5, 2.5, PITCH + 2, height - AXIS - 5);
      }
    }
  }

  describe(shown) {
    const step = this.chosen;
    let text = "";
    if (step) {
      const parts = [
        `step ${count(step.step)}`,
        this.clock_s === null ? `ended ${this.time(step)} before the newest` : `ended at ${this.time(step)}`,
        `${count(step.prefill)} prompt, ${count(step.decode)} decode` + (step.drafts ? `, ${count(step.drafts)} draft` : "") + " tokens",
        duration(step.took_s) + (step.predicted_s ? `, predicted ${duration(step.predicted_s)}` : "") + ` (host: schedule ${duration(step.schedule_s)}, launch ${duration(step.launch_s)}, ` +
          `wait ${duration(step.wait_s)}, retire ${duration(step.retire_s)})`,
        `${count(step.running)} running`,
      ];
      if (step.waiting) {
        const reason = REASONS[step.wait_reason] ?? step.wait_reason;
        parts.push(`${count(step.waiting)} waiting` + (reason ? ` for ${reason}` : ""));
      }
      if (step.idle_s >= PAUSE_S) parts.push(`began after ${duration(step.idle_s)} without work`);
      if (step.preempted) parts.push(`${step.preempted} preempted`);
      text = parts.join(" · ");
    } else if (shown.length > 1) {
      const seconds = shown.at(-1).end_s - shown[0].time_s;
      text = `${count(shown.length)} steps over ${duration(seconds)}, the newest on the right. Hover over a bar or use the arrow keys for details.`;
    } else {
      text = this.fresh ? "" : "No steps yet. Send a request to see some."; // fresh: the server has not told
    }
    if (this.readout.textContent !== text) this.readout.textContent = text;
    this.canvas.setAttribute("aria-label", `Chart of the latest ${shown.length} steps`);
  }
}
