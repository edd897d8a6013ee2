// The frame of the page: tabs, theme, API key, and the name of the model.

import { ApiProblem, api, setKey, storedKey } from "./api.js";
import { startChat } from "./chat.js";
import { LiveView } from "./live.js";

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

function startTheme() {
  const root = document.documentElement;
  const label = () => ($("theme-name").textContent = root.dataset.theme ?? "system");
  $("theme").addEventListener("click", () => {
    const next = { light: "dark", dark: null }[root.dataset.theme ?? ""];
    if (next === null) {
      delete root.dataset.theme;
      localStorage.removeItem("quire-theme");
    } else {
      root.dataset.theme = next ?? "light";
      localStorage.setItem("quire-theme", root.dataset.theme);
    }
    label();
    live.redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.redraw());
  label();
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
  startTheme();
  startChat(); // first, so that text typed while the rest loads is kept
  const about = await (await api("static/about.json")).json();
  $("key-field").hidden = !about.needs_key;
  $("key").value = storedKey();
  $("key-field").addEventListener("submit", (event) => event.preventDefault());
  $("key").addEventListener("change", () => {
    setKey($("key").value.trim());
    describe();
    live.reconnect();
  });
  if (about.needs_key && !storedKey()) {
    $("model").textContent = "";
    $("key").focus();
  } else {
    describe();
  }
  startTabs();
}

start();
