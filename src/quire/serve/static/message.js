// One message of the conversation. An answer collects chunks and shows their latency and throughput.

import { copies } from "./clipboard.js";
import { receiptStrip } from "./receipt.js";

const NAMES = { user: "You", assistant: "Model" };

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

export class Message {
  constructor(role, text = "") {
    this.text = text;
    this.element = make("article", `message ${role}`);
    this.element.append(make("h3", "", NAMES[role]));
    this.content = this.element.appendChild(make("div", "text", text));
    if (role !== "assistant") return;
    this.element.classList.add("streaming");
    this.element.setAttribute("aria-busy", "true");
    this.footer = this.element.appendChild(make("footer"));
    this.began = performance.now();
    this.first = this.last = null; // times of the first and the latest text
    this.thought = "";
    this.usage = null;
    this.warnings = [];
    this.reason = null;
    this.receipt = null;
    this.drawing = 0;
  }

  take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    this.receipt = chunk.receipt ?? this.receipt;
    this.warnings.push(...(chunk.warnings ?? []));
    for (const choice of chunk.choices ?? []) {
      const text = choice.delta?.content ?? choice.text ?? "";
      const calls = (choice.delta?.tool_calls ?? []).map((call) => call.function?.arguments ?? "").join("");
      const thought = choice.delta?.reasoning ?? "";
      if (text || calls || thought) {
        this.last = performance.now();
        this.first ??= this.last;
      }
      this.text += text + calls;
      this.thought += thought;
      this.reason = choice.finish_reason ?? this.reason;
    }
    if (!this.drawing) this.drawing = requestAnimationFrame(() => this.draw());
  }

  end(reason) {
    this.reason = reason ?? this.reason;
    this.element.classList.remove("streaming");
    this.element.removeAttribute("aria-busy");
    this.draw();
    if (this.receipt) this.footer.append(receiptStrip(this.receipt));
    for (const warning of this.warnings) this.footer.append(make("div", "warning", `Warning: ${warning}`));
  }

  fail(text) {
    this.end("error");
    this.element.append(make("p", "problem", text));
    this.problem = text;
  }

  get summary() {
    return this.problem ? `Error: ${this.problem}` : `Answer complete: ${this.usage?.completion_tokens ?? 0} tokens.`;
  }

  draw() {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    this.content.textContent = this.text;
    if (this.thought) {
      this.box ??= this.makeThought();
      this.box.lastChild.textContent = this.thought;
    }
    this.footer.replaceChildren(this.measures());
  }

  makeThought() {
    const box = make("details", "thought");
    box.open = true;
    box.append(make("summary", "", "Thinking"), make("div"));
    this.content.before(box);
    return box;
  }

  // Time to first token, tokens, tokens per second after the first one, cached prompt tokens, and the reason of the end.
  measures() {
    const list = make("dl", "measures");
    const put = (value, label) => {
      const pair = list.appendChild(make("div"));
      pair.append(make("dt", "", label), make("dd", "", value));
    };
    const tokens = this.usage?.completion_tokens ?? 0;
    if (this.first !== null) put(`${(this.first - this.began).toFixed(0)} ms`, "to first token");
    if (tokens) put(tokens.toLocaleString("en"), tokens === 1 ? "token" : "tokens");
    const seconds = (this.last - this.first) / 1000;
    if (tokens > 1 && seconds > 0) put(((tokens - 1) / seconds).toFixed(0), "tokens/s");
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (this.usage) put(`${cached ?? 0} of ${this.usage.prompt_tokens}`, "prompt tokens cached");
    const ends = { length: "reached max tokens", stopped: "stopped by you", error: "ended with an error" };
    if (ends[this.reason]) list.append(make("div", "", ends[this.reason]));
    if (this.reason && this.text) list.append(copies(make("button", "plain", "Copy"), () => this.text));
    return list;
  }
}
