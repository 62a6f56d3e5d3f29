// The frame of every page: address to page, theme, language, keys, the token. `#/run/NAME/step/4/7` is a trajectory.

import { takeTokenFromAddress, TokenNeeded, useToken } from "./data.js";
import { h, link, plain, replace, shown } from "./dom.js";
import { language, setLanguage, t } from "./language.js";
import { comparePage } from "./page_compare.js";
import { runPage } from "./page_run.js";
import { runsPage } from "./page_runs.js";
import { stepPage } from "./page_step.js";
import { trajectoryPage } from "./page_trajectory.js";

const main = document.getElementById("main");
const bar = document.getElementById("bar");
let leave = () => {};
let keys = {};
let visit = 0;

const PAGES = [
  [/^$/, () => runsPage],
  [/^compare\/([^/]+)$/, () => comparePage],
  [/^run\/([^/]+)(?:\/(curves|steps|recipe|plan|workers|logs|ledger))?(?:\/([^/]+))?$/, () => runPage],
  [/^run\/([^/]+)\/step\/([^/]+)$/, () => stepPage],
  [/^run\/([^/]+)\/step\/([^/]+)\/(\d+)(?:\/(conversation|tree|beside))?(?:\/(\d+))?$/, () => trajectoryPage],
];

const EVERYWHERE = {
  "?": ["this help", showHelp],
  r: [
    "list of runs",
    () => {
      location.hash = "#/";
    },
  ],
  u: ["one level up", () => (location.hash = parentOf(location.hash))],
  d: ["dark or light", toggleTheme],
  l: ["English or Chinese", toggleLanguage],
  "/": ["filter", () => main.querySelector("[data-filter]")?.focus()],
};

/** The page above: of a trajectory its step, of a step the run's steps, of a run the list. */
function parentOf(hash) {
  const [, kind, run, tab, step, index] = hash.split("/");
  if (kind !== "run" || !tab) return "#/";
  if (tab !== "step") return `#/run/${run}`;
  return index === undefined ? `#/run/${run}/steps` : `#/run/${run}/step/${step}`;
}

async function open() {
  const mine = ++visit;
  leave();
  leave = () => {};
  keys = {};
  const path = location.hash.replace(/^#\/?/, "").split("?")[0];
  const found = PAGES.map(([pattern, page]) => [path.match(pattern), page()]).find(([match]) => match);
  drawBar();
  if (!found) return replace(main, h("p", {}, t("There is no such page."), " ", link("#/", t("Runs"))));
  const [match, page] = found;
  try {
    const view = await page(...match.slice(1).map((part) => part && decodeURIComponent(part)));
    if (mine !== visit) return view.leave?.();
    leave = view.leave ?? leave;
    keys = view.keys ?? {};
    document.title = plain(`${view.title} · Corral`);
    drawBar(view.trail);
    replace(main, view.content);
    view.shown?.();
    scrollTo(0, 0);
  } catch (error) {
    if (mine !== visit) return;
    if (error instanceof TokenNeeded) askForToken();
    else {
      if (!(error instanceof Error) || error instanceof TypeError) console.error(error);
      replace(main, h("p", { class: "problem" }, shown(error.message)), h("p", {}, link("#/", t("Runs"))));
    }
  }
}

function drawBar(trail = []) {
  const steps = trail.flatMap(([name, href]) => [
    h("span", { class: "quiet" }, "/"),
    href ? link(href, shown(name)) : h("span", {}, shown(name)),
  ]);
  replace(
    bar,
    h("nav", { "aria-label": t("Where you are") }, link("#/", h("strong", {}, "Corral")), steps),
    h("span", { class: "grow" }),
    h(
      "button",
      { type: "button", class: "plain", title: `${t("English or Chinese")} (l)`, onclick: toggleLanguage },
      language() === "zh" ? "EN" : "中文",
    ),
    h("button", { type: "button", class: "plain", title: `${t("dark or light")} (d)`, onclick: toggleTheme }, "◐"),
    h("button", { type: "button", class: "plain", title: `${t("this help")} (?)`, onclick: showHelp }, "?"),
  );
}

function askForToken() {
  const field = h("input", { type: "password", autocomplete: "off", "aria-label": t("Token") });
  const form = h(
    "form",
    { class: "card" },
    h("p", {}, t("This server needs its token.")),
    field,
    " ",
    h("button", {}, t("Open")),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    useToken(field.value.trim());
    open();
  });
  replace(main, form);
  field.focus();
}

function toggleTheme() {
  const isDark = document.documentElement.dataset.theme === "dark";
  localStorage.setItem("corral-theme", isDark ? "light" : "dark");
  applyTheme();
}

function applyTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = localStorage.getItem("corral-theme") ?? system;
}

function toggleLanguage() {
  setLanguage(language() === "zh" ? "en" : "zh");
  open();
}

function showHelp() {
  const all = { ...EVERYWHERE, ...keys };
  const rows = Object.entries(all).map(([key, [what]]) =>
    h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, t(what))),
  );
  const close = h("button", { type: "button" }, t("Close"));
  const dialog = h("dialog", {}, h("h2", {}, t("Keys")), h("table", {}, h("tbody", {}, rows)), close);
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const action = keys[event.key] ?? EVERYWHERE[event.key];
  if (!action) return;
  event.preventDefault();
  action[1]();
});
addEventListener("hashchange", () => {
  takeTokenFromAddress();
  open();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
applyTheme();
takeTokenFromAddress();
open();
