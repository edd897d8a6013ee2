// The latency receipt of an answer as a bar: the terms that add up to its total latency.

const COLOURS = {
  queue: "request-8", transfer: "request-3", prefill: "prefill", lost_to_prefills: "request-1", preempted: "preempted",
  recompute: "request-6", decode: "decode", deliver: "request-7",
};

const CAUSES = { slots: "a slot", step: "the next step", latency: "the latency target",
  tokens: "the token budget", batch: "the end of the batch" };
const CACHE_ENDED = {
  new: "the next block was not cached",
  evicted: "the next block was evicted",
  off: "disabled",
  prompt_logprobs: "prompt_logprobs needs the whole prompt computed",
};

const asText = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toFixed(ms < 10 ? 1 : 0)} ms`);
const asName = (key) => key.replaceAll("_", " ");

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  element.className = className;
  element.append(...children);
  return element;
}

export function receiptStrip(receipt) {
  const shown = Object.entries(receipt.terms_ms ?? {}).filter(([, ms]) => ms >= 0.05);
  const total = shown.reduce((sum, [, ms]) => sum + ms, 0);
  if (!total) return make("div", "receipt");
  const strip = make("div", "strip");
  strip.setAttribute("role", "img");
  strip.setAttribute("aria-label", `Breakdown of ${asText(total)}`);
  const legend = make("ul", "legend", make("li", "", "Receipt ", make("b", "", asText(receipt.e2e_ms ?? total))));
  for (const [key, ms] of shown) {
    const part = make("i", "");
    part.style.background = `var(--${COLOURS[key] ?? "time"})`;
    const mark = part.cloneNode();
    part.style.width = `${(100 * ms) / total}%`;
    part.title = `${asName(key)}: ${asText(ms)}`;
    strip.append(part);
    legend.append(make("li", "", mark, `${asName(key)} `, make("b", "", asText(ms))));
  }
  return make("div", "receipt", strip, legend, make("p", "notes", notes(receipt)));
}

// Return notes beside the terms: why the request queued, why no more of it was cached, and the cost of preemptions.
function notes(receipt) {
  const found = Object.entries(receipt.queue_ms ?? {})
    .filter(([, ms]) => ms >= 0.05)
    .map(([cause, ms]) => `queued for ${CAUSES[cause] ?? asName(cause)}: ${asText(ms)}`);
  const ended = receipt.prompt_tokens?.cache_ended;
  if (ended && ended !== "end") found.push(`prefix cache: ${CACHE_ENDED[ended] ?? ended}`);
  if (receipt.draft_tokens) found.push(`${receipt.accepted_tokens} of ${receipt.draft_tokens} draft tokens accepted`);
  if (receipt.preemptions) found.push(`preempted ${receipt.preemptions} times, ${receipt.recomputed_tokens} tokens recomputed`);
  return found.join(" · ");
}
