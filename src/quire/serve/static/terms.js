// Explanations of the terms on the page. Elements with `data-term` show theirs on hover, focus or tap; the glossary of
// the live view lists them for readers without a pointer.

import { make } from "./dom.js";

export const TERMS = {
  // the row of figures
  running: ["Running", "Requests that hold a slot of the batch: each step computes some of their tokens."],
  waiting: ["Waiting", "Requests that the server has accepted and that have no slot yet."],
  generated: ["Generated", "Tokens of answers per second, over all requests, averaged over two seconds."],
  computed: ["Computed", "Tokens that went through the model per second: those of prompts and of answers. Cached prompt tokens are not among them."],
  "blocks-used": ["Blocks in use", "Blocks of the KV cache that running requests hold."],
  "shared-blocks": ["Shared", "Blocks that several running requests read, because their prompts begin alike."],
  "evictable-blocks": ["Evictable", "Free blocks whose content is kept: the prefix cache can still find it until the block is needed."],
  "cache-hits": ["Prefix cache hits", "Share of all prompt tokens since the start that were found in the prefix cache and not computed again."],
  preemptions: ["Preemptions", "How often a running request gave up its blocks to another one since the start. It is computed again later."],
  snapshots: ["State snapshots", "States of linear attention, Mamba or convolutions that the prefix cache can restore."],
  acceptance: ["Drafts accepted", "Share of the draft tokens since the start that became output, and of each position the share of the rows with drafts (speculative decoding)."],
  "accepted-length": ["Accepted length", "Mean number of tokens that a row with drafts generates in a step."],
  evictions: ["Evictions", "Cached blocks that were overwritten since the start, because no blank block was left."],
  // steps
  step: ["Step", "One pass of the model over the batch. The newest step is on the right."],
  "prompt-tokens": ["Prompt tokens", "Tokens of prompts that the step computed (prefill)."],
  "decode-tokens": ["Decode tokens", "Tokens of running answers that the step computed, one per request."],
  "draft-tokens": ["Draft tokens", "Guessed tokens that the step checked (speculative decoding)."],
  "step-time": ["Step time", "Time from the end of the previous step, or from the step's own start if that is later, to its end."],
  "off-scale": ["Off the scale", "The bar is longer than the strip is high. Its value is in the line below the chart."],
  preemption: ["Preemption", "In this step a request gave up its blocks to another one."],
  gap: ["Gap", "The engine had nothing to do for this long. Gaps below 0.1 s are not shown."],
  // blocks
  "kv-cache": ["KV cache", "Keys and values of all computed tokens, in blocks of a fixed number of tokens."],
  "one-request": ["One request", "Each running request has a colour; ten colours take turns. Select a request to see its blocks alone."],
  shared: ["Shared", "Read by several running requests."],
  evictable: ["Evictable", "Free, but its content is kept for the prefix cache."],
  others: ["Other requests", "Held by a request that is not listed, for instance one of another API key."],
  blank: ["Blank", "Free, with no content worth keeping."],
  // tables
  request: ["Request", "The engine's name of the request, counted up since the start. With several answers it ends in #0, #1 and so on."],
  client: ["Key", "The name of the API key that sent the request."],
  state: ["State", "prefill: its prompt is being computed. decode: its answer is being written."],
  prompt: ["Prompt", "Number of prompt tokens."],
  cached: ["Cached", "Prompt tokens that were found in the prefix cache."],
  answer: ["Answer", "Tokens generated so far, and the most that the answer may have."],
  speed: ["Tokens/s", "Tokens of this answer per second, averaged over the last two seconds."],
  blocks: ["Blocks", "Blocks of the KV cache that the request holds, shared ones included."],
  age: ["Age", "Time since the server received the request."],
  preempted: ["Preempted", "How often the request gave up its blocks to another one."],
  "waiting-for": ["Waiting because", "What the first request waits for. All others wait because they come after it."],
};
const LATER_MS = 150; // time to move the pointer from a term into its explanation

// Mark `element` as a term and return it.
export function term(element, name) {
  element.dataset.term = name;
  element.classList.add("term");
  return element;
}

export function startTerms() {
  const tip = document.body.appendChild(make("div", "tip"));
  tip.setAttribute("role", "tooltip");
  tip.id = "tip";
  tip.hidden = true;
  let closing = 0;
  const hide = () => (tip.hidden = true);
  const keep = () => clearTimeout(closing);
  const show = (element) => {
    keep();
    tip.textContent = TERMS[element.dataset.term][1];
    tip.hidden = false;
    place(tip, element.getBoundingClientRect());
  };
  const found = (event) => event.target.closest?.("[data-term]");
  document.addEventListener("pointerover", (event) => {
    if (found(event)) show(found(event));
    else if (event.target === tip) keep();
  });
  document.addEventListener("pointerout", (event) => {
    if (!found(event) && event.target !== tip) return;
    keep();
    closing = setTimeout(hide, LATER_MS);
  });
  document.addEventListener("click", (event) => (found(event) ? show(found(event)) : hide()));
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  document.addEventListener("scroll", hide, true);
}

// Put the tip below the term, or above it where the window ends.
function place(tip, { left, top, bottom }) {
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
  tip.style.top = `${bottom + height + 8 < innerHeight ? bottom + 4 : Math.max(8, top - height - 4)}px`;
}

export function fillGlossary(list) {
  for (const [name, text] of Object.values(TERMS)) list.append(make("dt", "", name), make("dd", "", text));
}
