// Several runs beside each other: curves, speed, and what differs in their recipes.

import { chartSettings, lineChart } from "./chart.js";
import { get } from "./data.js";
import { h, link, number, shown, table } from "./dom.js";
import { t } from "./language.js";
import { scores, stateChip } from "./page_runs.js";
import { metricsOf, PANELS, seriesOf } from "./panels.js";

export async function comparePage(list) {
  const ids = list.split(",").map(decodeURIComponent);
  const runs = await Promise.all(ids.map((id) => get("run", id, "run.json")));
  const settings = chartSettings();
  const all = runs.map(metricsOf);
  const window_ = h("input", {
    type: "range",
    min: 0,
    max: 20,
    value: 0,
    "aria-label": t("Smoothing"),
    oninput: () => settings.set({ window: Number(window_.value) }),
  });
  const log = h("input", { type: "checkbox", onchange: () => settings.set({ log: log.checked }) });

  // One metric in each chart, so that a color is a run.
  const patterns = PANELS.flatMap(([title, own]) => own.slice(0, 1).map((pattern) => [title, [pattern]]));
  const charts = patterns.map(
    ([title, own]) =>
      lineChart(
        t(title),
        () =>
          all.flatMap((metrics, index) =>
            seriesOf(metrics, own, `${ids[index]} `)
              .slice(0, 1)
              .map((one) => ({ ...one, name: ids[index], color: index % 8 })),
          ),
        settings,
      ).element,
  );
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
    number(mean(all[index], "time/step_s"), 3),
    number(mean(all[index], "speed/tokens_per_s"), 3),
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
      h("h2", {}, t("What differs in the recipes")),
      differences(runs),
      h(
        "div",
        { class: "toolbar" },
        h("label", {}, t("Smoothing"), " ", window_),
        h("label", {}, log, " ", t("Log axis")),
        h("button", { type: "button", onclick: () => settings.set({ range: null }) }, t("Whole run")),
      ),
      h("div", { class: "charts" }, charts),
    ],
    shown: settings.draw,
    leave: settings.leave,
    keys: { 0: ["whole curves", () => settings.set({ range: null })] },
  };
}

function mean(metrics, name) {
  const values = (metrics.columns.get(name) ?? []).filter((value) => value !== null);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function differences(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.recipe)))].sort();
  const written = (run, key) => (key in run.recipe ? JSON.stringify(run.recipe[key]) : null);
  const differing = keys.filter((key) => key !== "name" && new Set(runs.map((run) => written(run, key))).size > 1);
  if (!differing.length) return h("p", { class: "quiet" }, t("Nothing but the name."));
  return table(
    [t("Key"), ...runs.map((run) => shown(run.id))],
    differing.map((key) => [
      h("code", {}, shown(key)),
      ...runs.map((run) =>
        written(run, key) === null ? h("span", { class: "quiet" }, t("default")) : shown(written(run, key), 200),
      ),
    ]),
  );
}
