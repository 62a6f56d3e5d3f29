// The list of runs.

import { sparkline } from "./bars.js";
import { get } from "./data.js";
import { duration, h, link, messageOf, number, plain, shown, table } from "./dom.js";
import { t } from "./language.js";

const AGAIN_MS = 5000;

export async function runsPage() {
  let overview = await get("runs.json");
  const chosen = new Set();
  const body = h("div");
  const filter = h("input", {
    type: "search",
    placeholder: t("Filter"),
    "aria-label": t("Filter"),
    "data-filter": true,
    oninput: draw,
  });
  const compare = h("button", { type: "button", disabled: true, onclick: openComparison }, t("Compare"));

  function openComparison() {
    location.hash = `#/compare/${[...chosen].map(encodeURIComponent).map(encodeURIComponent).join(",")}`;
  }

  function draw() {
    const text = filter.value.toLowerCase();
    const runs = overview.runs.filter((run) =>
      `${run.id} ${run.model} ${run.algorithm} ${run.state}`.toLowerCase().includes(text),
    );
    runs.sort((one, other) => (other.updated ?? 0) - (one.updated ?? 0));
    if (!overview.runs.length) return body.replaceChildren(empty());
    const head = ["", t("Run"), t("State"), t("Curve"), t("Held-out score"), t("Steps"), t("Speed"), t("Updated")];
    body.replaceChildren(table(head, runs.map(row), { class: "runs" }));
  }

  function empty() {
    return h(
      "div",
      { class: "card" },
      h("p", {}, t("There is no run here yet.")),
      overview.folders.map((folder) => h("p", { class: "quiet" }, shown(folder))),
    );
  }

  function row(run) {
    const box = h("input", {
      type: "checkbox",
      checked: chosen.has(run.id),
      "aria-label": `${t("Compare")} ${run.id}`,
    });
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(run.id);
      else chosen.delete(run.id);
      compare.disabled = chosen.size < 2;
    });
    const about = [run.algorithm, run.model].filter(Boolean).join(" · ");
    return [
      box,
      h(
        "td",
        {},
        h("div", {}, link(`#/run/${encodeURIComponent(run.id)}`, h("strong", {}, shown(run.id)))),
        h("div", { class: "quiet small cut" }, shown(about)),
        run.problems.map((one) => h("div", { class: "problem small" }, shown(one))),
      ),
      h(
        "td",
        {},
        stateChip(run.state),
        run.last_line
          ? h("div", { class: "quiet small cut", title: plain(run.last_line) }, shown(messageOf(run.last_line), 120))
          : null,
      ),
      h(
        "td",
        {},
        run.sparkline.length > 1 ? sparkline(run.sparkline) : null,
        h(
          "div",
          { class: "quiet small" },
          run.sparkline.length ? `${run.curve} ${number(run.sparkline.at(-1), 3)}` : "",
        ),
      ),
      h("td", {}, scores(run)),
      `${run.step}${run.num_steps ? ` / ${run.num_steps}` : ""}`,
      run.tokens_per_s ? `${number(run.tokens_per_s, 3)} tok/s` : "",
      run.updated ? t("{} ago").replace("{}", duration(Math.max(1, Math.round(Date.now() / 1000 - run.updated)))) : "",
    ];
  }

  draw();
  const timer = overview.live
    ? setInterval(async () => {
        if (document.hidden) return;
        overview = await get("runs.json").catch(() => overview);
        draw();
      }, AGAIN_MS)
    : 0;
  return {
    title: t("Runs"),
    content: [
      h("div", { class: "toolbar" }, h("h1", {}, t("Runs")), h("span", { class: "grow" }), filter, compare),
      body,
    ],
    leave: () => clearInterval(timer),
    keys: { c: ["compare the chosen runs", () => compare.disabled || openComparison()] },
  };
}

export function stateChip(state) {
  return h("span", { class: `chip ${state}` }, t(state));
}

export function scores(run) {
  const isWithin = ({ value, min, max }) => [value, min ?? value, max ?? value].every((one) => one >= 0 && one <= 1);
  const isFraction = [run.before, run.after].every((score) => !score || (score.kind === "score" && isWithin(score)));
  const text = (value, digits) =>
    isFraction && value !== null ? `${number(100 * value, digits)} %` : number(value, digits);
  if (!run.before) return h("span", { class: "quiet" }, "–");
  const range = run.after?.ci95 ? h("span", { class: "quiet small" }, ` ± ${text(run.after.ci95, 2)}`) : null;
  return h(
    "span",
    {},
    text(run.before.value, 3),
    run.after ? [" → ", h("strong", {}, text(run.after.value, 3)), range] : null,
  );
}
