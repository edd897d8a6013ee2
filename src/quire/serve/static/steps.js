// The step chart: a bar per step, the newest on the right, in three strips: prompt tokens, decode tokens, step time.

import { colours, count, duration, nice, surface } from "./draw.js";

const KEPT = 1024;
const PITCH = 4; // pixels from one bar to the next
const LEFT = 104;
const RIGHT = 10;
const GAP = 15; // pixels above each strip, with room for preemption marks
const REASONS = {
  slots: "a slot", blocks: "free blocks", tokens: "the token budget", batch: "the end of the batch",
  results: "results in flight", grammar: "a grammar",
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
    Object.assign(this, { canvas, readout, steps: [], chosen: null, colours: null });
    canvas.addEventListener("mousemove", (event) => this.choose(this.at(event.offsetX)));
    canvas.addEventListener("mouseleave", () => this.choose(null));
    canvas.addEventListener("blur", () => this.choose(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  add(steps) {
    if (steps.length && this.steps.length && steps[0].step <= this.steps.at(-1).step) this.steps = []; // the engine was restarted
    this.steps = [...this.steps, ...steps].slice(-KEPT);
  }

  get bars() {
    return Math.max(1, Math.floor((this.canvas.clientWidth - LEFT - RIGHT) / PITCH));
  }

  // Return the step at pointer position x.
  at(x) {
    const back = Math.floor((this.canvas.clientWidth - RIGHT - x) / PITCH);
    return back < 0 || back >= this.bars ? null : (this.steps[this.steps.length - 1 - back] ?? null);
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -KEPT, End: KEPT }[event.key];
    if (event.key === "Escape") this.choose(null);
    if (!move || !this.steps.length) return;
    event.preventDefault();
    const from = this.chosen ? this.steps.indexOf(this.chosen) : this.steps.length;
    const first = Math.max(0, this.steps.length - this.bars);
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
      this.colours = colours(["prefill", "decode", "drafts", "time", "preempted", "quiet", "line", "accent"]);
    }
    const shown = this.steps.slice(-this.bars);
    const each = on.height / STRIPS.length;
    on.context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    STRIPS.forEach((strip, index) => this.strip(on, strip, shown, each * index + GAP, each - GAP - 6));
    this.marks(on, shown);
    this.describe(shown);
  }

  strip({ context, width }, { label, parts, scale }, shown, top, height) {
    const total = (step) => parts.reduce((sum, [, value]) => sum + value(step), 0);
    const bound = nice(Math.max(1, highest(shown.map(total))));
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
      shown.forEach((step, index) => {
        const tall = (value(step) / bound) * height;
        if (!tall) return;
        const high = Math.min(Math.max(1, tall), height - bottom[index]);
        const x = this.x(width, shown.length, index);
        context.fillRect(x, top + height - bottom[index] - high, PITCH - 1, high);
        if (tall > high + 1) context.clearRect(x, top + 4, PITCH - 1, 3); // a gap marks a bar that exceeds the scale
        bottom[index] += high;
      });
    }
  }

  x(width, length, index) {
    return width - RIGHT - (length - index) * PITCH;
  }

  marks({ context, width, height }, shown) {
    shown.forEach((step, index) => {
      const x = this.x(width, shown.length, index);
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
        context.strokeRect(x - 1.5, 2.5, PITCH + 2, height - 5);
      }
    });
  }

  describe(shown) {
    const step = this.chosen;
    let text = "";
    if (step) {
      const parts = [
        `step ${count(step.step)}`,
        `${count(step.prefill)} prompt, ${count(step.decode)} decode` + (step.drafts ? `, ${count(step.drafts)} draft` : "") + " tokens",
        `${duration(step.took_s)} (host: schedule ${duration(step.schedule_s)}, launch ${duration(step.launch_s)}, ` +
          `wait ${duration(step.wait_s)}, retire ${duration(step.retire_s)})`,
        `${count(step.running)} running`,
      ];
      if (step.waiting) {
        const reason = REASONS[step.wait_reason] ?? step.wait_reason;
        parts.push(`${count(step.waiting)} waiting` + (reason ? ` for ${reason}` : ""));
      }
      if (step.preempted) parts.push(`${step.preempted} preempted`);
      text = parts.join(" · ");
    } else if (shown.length > 1) {
      const seconds = shown.at(-1).time_s - shown[0].time_s;
      text = `${count(shown.length)} steps over ${duration(seconds)}, the newest on the right. Hover over a bar or use the arrow keys for details.`;
    } else {
      text = "No steps yet. Send a request to see some.";
    }
    if (this.readout.textContent !== text) this.readout.textContent = text;
    this.canvas.setAttribute("aria-label", `Chart of the latest ${shown.length} steps`);
  }
}
