// Several runs beside each other: curves, speed, and what differs in their recipes.

import { chartSettings, lineChart } from "./chart.js";
import { get } from "./data.js";
import { h, link, number, shown, table } from "./dom.js";
import { t } from "./language.js";
import { scores, stateChip } from "./page_runs.js";
import { mean, measured, metricsOf, namesOf, PANELS } from "./panels.js";

export async function comparePage(list) {
  const ids = list.split(",").map(decodeURIComponent);
  const load = (name) => Promise.all(ids.map((id) => get("run", id, `${name}.json`)));
  const [runs, files] = await Promise.all([load("run"), load("metrics")]);
  const settings = chartSettings();
  const all = files.map(metricsOf);
  const window_ = h("input", {
    type: "range",
    min: 0,
    max: 20,
    value: 0,
    "aria-label": t("Smoothing"),
    oninput: () => settings.set({ window: Number(window_.value) }),
  });
  const log = h("input", { type: "checkbox", onchange: () => settings.set({ log: log.checked }) });

  // One metric in each chart, the first that a run has, so that a color is a run.
  const charts = PANELS.flatMap(([title, patterns]) => {
    const [name] = all.flatMap((metrics) => namesOf(metrics, patterns));
    if (!name) return [];
    const series = () =>
      all.flatMap((metrics, index) =>
        metrics.columns.has(name)
          ? [{ name: ids[index], steps: metrics.steps, values: metrics.columns.get(name), color: index % 8 }]
          : [],
      );
    return [lineChart(`${t(title)}: ${name}`, series, settings).element];
  });
  const rows = runs.map((run, index) => [
    h(
      "td",
      {},
      h("span", { class: `key line-${index % 8}` }),
      link(`#/run/${encodeURIComponent(run.id)}`, shown(run.id)),
    ),
    stateChip(run.state),
    `${run.step}${run.num_steps ? ` / ${run.num_steps}` : ""}`,
    scores(run),
    number(mean(measured(all[index], "time/step_s")), 3),
    number(mean(measured(all[index], "speed/tokens_per_s")), 3),
  ]);
  return {
    title: t("Compare"),
    trail: [[t("Compare")]],
    content: [
      h("h1", {}, t("Compare")),
      table(
        [t("Run"), t("State"), t("Steps"), t("Held-out score"), t("Seconds per step"), t("Tokens per second")],
        rows,
      ),
      h(
        "div",
        { class: "toolbar" },
        h("label", {}, t("Smoothing"), " ", window_),
        h("label", {}, log, " ", t("Log axis")),
        h("button", { type: "button", onclick: () => settings.set({ range: null }) }, t("Whole run")),
      ),
      h("div", { class: "charts" }, charts),
      differences(runs),
    ],
    shown: settings.draw,
    leave: settings.leave,
    keys: { 0: ["whole curves", () => settings.set({ range: null })] },
  };
}

function differences(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.recipe)))].sort();
  const written = (run, key) => (key in run.recipe ? JSON.stringify(run.recipe[key]) : null);
  const differing = keys.filter((key) => key !== "name" && new Set(runs.map((run) => written(run, key))).size > 1);
  if (!differing.length) return h("p", { class: "quiet" }, t("The recipes differ in nothing but the name."));
  const rows = differing.map((key) => [
    h("code", {}, shown(key)),
    ...runs.map((run) =>
      written(run, key) === null ? h("span", { class: "quiet" }, t("default")) : shown(written(run, key), 200),
    ),
  ]);
  const head = [t("Key"), ...runs.map((run) => shown(run.id))];
  return h("details", {}, h("summary", {}, `${t("What differs in the recipes")} (${rows.length})`), table(head, rows));
}
