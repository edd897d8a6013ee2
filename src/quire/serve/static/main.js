// The frame of the page: tabs and the name of the model.

import { ApiProblem, api, keyIsMissing, startKey } from "./api.js";
import { showBlocked, startChat } from "./chat.js";
import { LiveView } from "./live.js";
import { fillGlossary, startTerms } from "./terms.js";
import { startTheme } from "./themes.js";

const $ = (id) => document.getElementById(id);
const tabs = [$("tab-chat"), $("tab-live")];
const live = new LiveView();

function show(name) {
  for (const tab of tabs) {
    const selected = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", selected);
    tab.tabIndex = selected ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !selected;
  }
  live.setVisible(name === "live" && !document.hidden);
}

const shown = () => (location.hash === "#live" ? "live" : "chat");

function startTabs() {
  for (const tab of tabs) {
    tab.addEventListener("click", () => (location.hash = tab.id.replace("tab-", "")));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = tabs[1 - tabs.indexOf(tab)];
      other.click();
      other.focus();
    });
  }
  addEventListener("hashchange", () => show(shown()));
  document.addEventListener("visibilitychange", () => show(shown()));
  show(shown());
}

async function describe() {
  try {
    const [model] = (await (await api("v1/models")).json()).data;
    $("model").textContent = `${model.id} · context ${model.max_model_len.toLocaleString("en")} tokens`;
  } catch (problem) {
    $("model").textContent = problem instanceof ApiProblem ? problem.message : "the server does not respond";
  }
}

async function start() {
  startTheme(() => live.redraw());
  startTerms();
  fillGlossary($("glossary"));
  startChat(); // first, so that text typed while the rest loads is kept
  await startKey(() => {
    describe();
    showBlocked();
    live.reconnect();
  });
  showBlocked();
  if (keyIsMissing()) $("model").textContent = "";
  else describe();
  startTabs();
}

start();
