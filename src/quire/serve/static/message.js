// One message of the conversation. An answer collects chunks and shows their latency and throughput.

import { copyButton } from "./clipboard.js";
import { button, make } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { receiptStrip } from "./receipt.js";
import { tokensOf, tokenView } from "./tokens.js";

const ENDS = { length: "reached max tokens", stopped: "stopped by you", error: "ended with an error" };

// The user's message. `edit` is called with the new text.
export class UserMessage {
  constructor(entry, edit) {
    this.entry = entry;
    this.element = make("article", "message user", make("h3", "", "You"));
    this.content = make("div", "text", entry.content);
    this.actions = make(
      "div",
      "actions",
      copyButton(() => entry.content),
      button("plain", "Edit", () => this.edit(edit)),
    );
    this.element.append(this.content, this.actions);
  }

  // Replace the text by a form until it is sent or left.
  edit(done) {
    const field = make("textarea", "", this.entry.content);
    field.setAttribute("aria-label", "Edited message");
    field.rows = Math.min(12, this.entry.content.split("\n").length + 1);
    const form = make("form", "edit", field);
    const leave = () => {
      form.remove();
      this.content.hidden = this.actions.hidden = false;
      this.actions.lastChild.focus();
    };
    const send = make("button", "main", "Send");
    form.append(make("p", "quiet", "Sending replaces everything below this message."));
    form.append(make("div", "actions", send, button("plain", "Cancel", leave)));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim() && done(this.entry, field.value) === false) field.focus();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && event.target === field && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
      if (event.key === "Escape") leave();
    });
    this.content.hidden = this.actions.hidden = true;
    this.element.append(form);
    field.focus();
  }
}

// An answer. `entry` is what is stored: of a finished answer, or an empty one to which `take` adds chunks.
export class Answer {
  constructor(entry, actions) {
    Object.assign(this, { entry, actions, drawing: 0, warnings: [], problem: null });
    this.element = make("article", "message assistant", make("h3", "", "Model"));
    this.content = this.element.appendChild(make("div", "text"));
    this.footer = this.element.appendChild(make("footer"));
    this.showsTokens = (entry.logprobs?.length ?? 0) > 0;
  }

  // Begin to wait for chunks.
  begin() {
    this.element.classList.add("streaming");
    this.element.setAttribute("aria-busy", "true");
    this.began = performance.now();
    this.first = this.last = null; // times of the first and the latest text
    return this;
  }

  take(chunk) {
    const { entry } = this;
    entry.usage = chunk.usage ?? entry.usage;
    entry.receipt = chunk.receipt ?? entry.receipt;
    this.warnings.push(...(chunk.warnings ?? []));
    for (const choice of chunk.choices ?? []) {
      const text = choice.delta?.content ?? choice.text ?? "";
      const calls = (choice.delta?.tool_calls ?? []).map((call) => call.function?.arguments ?? "").join("");
      const thought = choice.delta?.reasoning ?? "";
      if (text || calls || thought) {
        this.last = performance.now();
        this.first ??= this.last;
      }
      entry.content += text + calls;
      entry.thought = (entry.thought ?? "") + thought;
      entry.reason = choice.finish_reason ?? entry.reason;
      const tokens = tokensOf(choice);
      if (tokens.length) (entry.logprobs ??= []).push(...tokens);
    }
    if (this.first !== null) entry.speed = { first_ms: this.first - this.began, seconds: (this.last - this.first) / 1000 };
    if (!this.drawing) this.drawing = requestAnimationFrame(() => this.draw());
  }

  end(reason) {
    this.entry.reason = reason ?? this.entry.reason ?? "stop";
    this.element.classList.remove("streaming");
    this.element.removeAttribute("aria-busy");
    this.showsTokens = (this.entry.logprobs?.length ?? 0) > 0;
    this.draw();
    return this;
  }

  fail(text) {
    this.problem = text;
    this.end("error");
    const retry = button("plain", "Try again", () => this.actions.retry(this));
    this.element.append(make("div", "problem", make("p", "", text), retry));
    return this;
  }

  get summary() {
    return this.problem ? `Error: ${this.problem}` : `Answer complete: ${this.entry.usage?.completion_tokens ?? 0} tokens.`;
  }

  draw() {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    const { entry } = this;
    this.drawText();
    if (entry.thought) {
      this.box ??= this.makeThought();
      this.box.lastChild.textContent = entry.thought;
    }
    this.footer.replaceChildren(this.measures());
    if (!entry.reason || this.element.classList.contains("streaming")) return;
    if (!this.problem) this.footer.append(this.makeActions());
    if (entry.receipt) this.footer.append(receiptStrip(entry.receipt));
    for (const warning of this.warnings) this.footer.append(make("div", "warning", `Warning: ${warning}`));
  }

  drawText() {
    const { entry } = this;
    if (this.showsTokens) {
      this.content.replaceChildren(tokenView(entry.logprobs));
    } else if (entry.plain) {
      this.content.textContent = entry.content;
    } else {
      if (!this.markdown) this.content.replaceChildren();
      this.markdown ??= new MarkdownView(this.content);
      this.markdown.show(entry.content);
    }
    this.content.classList.toggle("plain-text", this.showsTokens || entry.plain);
  }

  makeThought() {
    const box = make("details", "thought", make("summary", "", "Thinking"), make("div"));
    box.open = true;
    this.content.before(box);
    return box;
  }

  makeActions() {
    const { entry } = this;
    const row = make("div", "actions");
    if (entry.content) row.append(copyButton(() => entry.content));
    row.append(button("plain", "Regenerate", () => this.actions.regenerate(entry)));
    if (entry.logprobs?.length) {
      const toggle = button("plain", "Log-probabilities", () => {
        this.showsTokens = !this.showsTokens;
        this.markdown = null;
        this.content.replaceChildren();
        this.drawText();
        toggle.setAttribute("aria-pressed", this.showsTokens);
      });
      toggle.setAttribute("aria-pressed", this.showsTokens);
      row.append(toggle);
    }
    return row;
  }

  // Time to first token, tokens, tokens per second after the first one, cached prompt tokens, and the reason of the end.
  measures() {
    const { usage, speed, reason } = this.entry;
    const list = make("dl");
    const put = (value, label) => list.append(make("div", "", make("dt", "", label), make("dd", "", value)));
    const tokens = usage?.completion_tokens ?? 0;
    if (speed) put(`${speed.first_ms.toFixed(0)} ms`, "to first token");
    if (tokens) put(tokens.toLocaleString("en"), tokens === 1 ? "token" : "tokens");
    if (tokens > 1 && speed?.seconds > 0) put(((tokens - 1) / speed.seconds).toFixed(0), "tokens/s");
    if (usage) put(`${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens}`, "prompt tokens cached");
    return make("div", "measures", list, make("span", "", ENDS[reason] ?? ""));
  }
}
