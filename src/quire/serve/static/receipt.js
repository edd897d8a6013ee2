// The latency receipt of an answer as a small bar: whatever durations it holds, in its own order.

const COLOURS = ["prefill", "decode", "drafts", "preempted", "request-6", "request-1", "request-7", "request-8", "time"];
const WHOLE = /^(total|e2e|end_to_end|sum)/; // a term that is the sum of others is not one of them

// [name, milliseconds] of each duration, however deep: names end in _s or _ms, or are in an object whose name does.
export function terms(receipt, unit = null) {
  const found = [];
  for (const [key, value] of Object.entries(receipt)) {
    const [, name, ending] = /^(.*?)(?:_(ms|s|seconds))?$/.exec(key);
    const own = ending ?? unit;
    if (value && typeof value === "object" && !Array.isArray(value)) {
      const prefix = /^(terms|times|time|durations|wait|waited)?$/.test(name) ? "" : `${name}: `;
      found.push(...terms(value, own).map(([inner, ms]) => [prefix + inner, ms]));
    } else if (typeof value === "number" && own && !WHOLE.test(name)) {
      found.push([name.replaceAll("_", " "), own === "ms" ? value : value * 1000]);
    }
  }
  return found;
}

const asText = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toFixed(ms < 10 ? 1 : 0)} ms`);

export function receiptStrip(receipt) {
  const box = document.createElement("div");
  box.className = "receipt";
  const shown = terms(receipt).filter(([, ms]) => ms > 0);
  const total = shown.reduce((sum, [, ms]) => sum + ms, 0);
  if (!total) return box;
  const strip = box.appendChild(document.createElement("div"));
  strip.className = "strip";
  strip.setAttribute("role", "img");
  strip.setAttribute("aria-label", `Where ${asText(total)} went`);
  const legend = box.appendChild(document.createElement("ul"));
  legend.className = "legend";
  shown.forEach(([name, ms], index) => {
    const colour = `var(--${COLOURS[index % COLOURS.length]})`;
    const part = strip.appendChild(document.createElement("i"));
    part.style.background = colour;
    part.style.width = `${(100 * ms) / total}%`;
    part.title = `${name}: ${asText(ms)}`;
    const item = legend.appendChild(document.createElement("li"));
    const mark = item.appendChild(document.createElement("i"));
    mark.style.background = colour;
    const value = document.createElement("b");
    value.textContent = asText(ms);
    item.append(`${name} `, value);
  });
  return box;
}
