// The tokens of an answer with their log-probabilities: the less likely a token was, the stronger its background.

import { make } from "./dom.js";

const STEPS = [0.9, 0.6, 0.3, 0.1]; // probabilities at which the background changes

// Return the tokens of a chunk's choice as [{ token, logprob, top: [[token, logprob], ...] }].
export function tokensOf({ logprobs }) {
  if (!logprobs) return [];
  if (logprobs.content !== undefined) {
    return (logprobs.content ?? []).map(({ token, logprob, top_logprobs: top }) => ({
      token,
      logprob,
      top: (top ?? []).map((other) => [other.token, other.logprob]),
    }));
  }
  return logprobs.tokens.map((token, index) => ({
    token,
    logprob: logprobs.token_logprobs[index],
    top: Object.entries(logprobs.top_logprobs?.[index] ?? {}),
  }));
}

export function tokenView(tokens) {
  const spans = tokens.map(({ token, logprob }) => {
    const level = STEPS.filter((step) => Math.exp(logprob) < step).length;
    return make("span", `token likely-${level}`, token);
  });
  const text = make("div", "tokens", ...spans);
  text.tabIndex = 0;
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", "Tokens of the answer. Arrow keys move from token to token.");
  const readout = make("p", "token-readout", "Hover over a token, or use the arrow keys, for its probability and the alternatives.");
  readout.setAttribute("role", "status");
  let chosen = -1;
  const choose = (index) => {
    spans[chosen]?.classList.remove("chosen");
    chosen = index;
    spans[chosen].classList.add("chosen");
    readout.replaceChildren(...described(tokens[chosen]));
  };
  const point = (event) => {
    const index = spans.indexOf(event.target);
    if (index >= 0 && index !== chosen) choose(index);
  };
  text.addEventListener("pointerover", point);
  text.addEventListener("click", point);
  text.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -spans.length, End: spans.length }[event.key];
    if (!move) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(spans.length - 1, chosen + move)));
  });
  return make("div", "", text, readout);
}

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 0.01 ? `${share.toPrecision(share > 99.95 ? 4 : 3)} %` : "< 0.01 %";
};

function described({ token, logprob, top }) {
  const others = top.filter(([other]) => other !== token).sort((a, b) => b[1] - a[1]);
  const shown = (name) => make("code", "", JSON.stringify(name));
  const list = others.flatMap(([other, value], index) => [index ? ", " : " · otherwise ", shown(other), ` ${percent(value)}`]);
  return [shown(token), ` ${percent(logprob)} (log-probability ${logprob.toFixed(3)})`, ...list];
}
