// A run: curves, live while it is trained; its steps; recipe, plan, logs, ledger.

import { rewardMap, rewardsByLength, stackedBars } from "./bars.js";
import { chartSettings, lineChart } from "./chart.js";
import { get, listen, stepName } from "./data.js";
import { duration, h, link, messageOf, number, plain, replace, shown, table } from "./dom.js";
import { t } from "./language.js";
import { scores, stateChip } from "./page_runs.js";
import { constantsOf, healthOf, metricsOf, namesOf, PANELS, rewardPartsOf, SECTIONS, seriesOf, timesOf } from "./panels.js";
import { placementPicture } from "./placement.js";

const TABS = ["curves", "steps", "recipe", "plan", "workers", "logs", "ledger"];
const LOOK_EVERY_MS = 3000;

export async function runPage(id, tab = "curves", more) {
  const load = () => Promise.all([get("run", id, "run.json"), get("run", id, "metrics.json")]);
  let [detail, file] = await load();
  let metrics = metricsOf(file);
  const address = `#/run/${encodeURIComponent(id)}`;
  const settings = chartSettings();
  const head = h("div");
  const body = h("div");
  const live = h("span", { class: "live", hidden: true }, t("live"));

  function drawHead() {
    replace(
      head,
      h(
        "div",
        { class: "toolbar" },
        h("h1", {}, shown(id)),
        stateChip(detail.state),
        live,
        h("span", { class: "grow" }),
        h("span", {}, `${t("Held-out score")} `, scores(detail)),
      ),
      h(
        "p",
        { class: "quiet small" },
        [
          detail.algorithm,
          detail.model,
          t("step {}").replace("{}", `${detail.step}${detail.num_steps ? ` / ${detail.num_steps}` : ""}`),
          detail.folder,
        ]
          .filter(Boolean)
          .map((part, index) => [index ? " · " : "", shown(part)]),
      ),
      detail.problems.map((problem) => h("p", { class: "problem" }, shown(problem))),
      lastWords(),
      h("p", { class: "health" }, healthOf(metrics).map(([words, isWarning], index) => [
        index ? "; " : "",
        h("span", { class: isWarning ? "warning" : null }, words),
      ])),
      h(
        "div",
        { class: "tabs" },
        TABS.map((name) =>
          h("a", { href: `${address}/${name}`, "aria-current": name === tab ? "page" : null }, t(name)),
        ),
      ),
    );
  }

  /** The last line of the log; of a failed run with the samples that it ended with. */
  function lastWords() {
    const hasFailed = detail.state === "failed";
    if (!detail.last_line) return null;
    const part = detail.parts.findLast(([, kind]) => kind === "failed") ?? detail.parts.at(-1);
    return h(
      "p",
      { class: hasFailed ? "problem" : "quiet small", title: plain(detail.last_line) },
      shown(messageOf(detail.last_line), 400),
      hasFailed && part ? [" ", link(`${address}/step/${stepName(...part)}`, t("Its last samples"))] : null,
    );
  }

  const draw = {
    curves: () => curves(id, () => metrics, detail.recipe, settings, openStep, address),
    steps: () => steps(detail, metrics, address),
    recipe: () => text(detail.texts.recipe),
    plan: () => [placementPicture(detail.placement), text(detail.texts.plan)],
    workers: () => workers(id, detail, isServed, address),
    logs: () => logs(id, detail, more, address),
    ledger: () => ledger(id, more, address),
  }[tab];

  function openStep(step) {
    const part =
      detail.parts.find(([own, kind]) => own === step && !kind) ?? detail.parts.find(([own]) => own === step);
    if (part) location.hash = `${address}/step/${stepName(...part)}`;
  }

  function receive(news) {
    if (news.reset)
      return load().then((fresh) => {
        [detail, file] = fresh;
        metrics = metricsOf(file);
        drawHead();
        if (tab === "curves") settings.draw();
      });
    news.rows.forEach(metrics.add);
    Object.assign(detail, {
      state: news.state,
      last_line: news.last_line,
      step: news.step,
      after: news.after,
      parts: news.parts,
    });
    drawHead();
    if (tab === "steps") replace(body, draw());
    if (tab === "curves" && news.rows.length) settings.draw();
  }

  const isServed = (await get("runs.json")).live;
  drawHead();
  replace(body, await draw());
  const stop = isServed
    ? listen(id, file.position, receive, (isOn) => {
        live.hidden = !isOn || detail.state !== "running";
      })
    : () => {};
  const looking =
    tab === "workers" && isServed
      ? setInterval(() => {
          if (detail.state === "running") body.querySelector(".workers")?.dispatchEvent(new Event("look"));
        }, LOOK_EVERY_MS)
      : 0;
  return {
    title: id,
    trail: [[id, address]],
    content: [head, body],
    shown: settings.draw,
    leave: () => {
      stop();
      clearInterval(looking);
      settings.leave();
    },
    keys: {
      0: ["whole curves", () => settings.set({ range: null })],
      ...Object.fromEntries(
        TABS.map((name, index) => [
          String(index + 1),
          [
            name,
            () => {
              location.hash = `${address}/${name}`;
            },
          ],
        ]),
      ),
    },
  };
}

function curves(id, getMetrics, recipe, settings, openStep, address) {
  const window_ = h("input", {
    type: "range",
    min: 0,
    max: 20,
    value: 0,
    "aria-label": t("Smoothing"),
    oninput: () => settings.set({ window: Number(window_.value) }),
  });
  const log = h("input", { type: "checkbox", onchange: () => settings.set({ log: log.checked }) });
  const whole = h("button", { type: "button", onclick: () => settings.set({ range: null }) }, t("Whole run"));
  const filter = h("input", {
    type: "search",
    placeholder: t("Filter metrics"),
    "aria-label": t("Filter metrics"),
    "data-filter": true,
    oninput: () => drawMore(),
  });
  const sections = SECTIONS.map(([heading, panels]) => {
    const charts = panels.map(
      ([title, patterns]) => lineChart(t(title), () => seriesOf(getMetrics(), patterns), settings, openStep).element,
    );
    const section = h("section", {}, h("h2", {}, t(heading)), h("div", { class: "charts" }, charts));
    settings.add(() => {
      section.hidden = charts.every((chart) => chart.hidden);
    });
    return section;
  });
  const constants = h("p", { class: "quiet small" });
  settings.add(() => {
    const found = constantsOf(getMetrics()).map(([name, value]) => `${name} ${number(value, 4)}`);
    replace(constants, found.length ? `${t("Always the same:")} ${found.join(", ")}` : "");
  });
  const rewards = h("section", {});
  drawRewards(id, rewards, openStep, address);
  const parts = stackedBars(
    t("What the reward is the sum of"),
    () => rewardPartsOf(getMetrics(), recipe),
    settings,
    openStep,
    "",
  ).element;
  const times = stackedBars(
    t("Where the time of a step goes"),
    () => timesOf(getMetrics()),
    settings,
    openStep,
  ).element;
  const rest = h("div", { class: "charts" });
  const drawn = new Map();

  function drawMore() {
    const metrics = getMetrics();
    const usual = new Set(PANELS.flatMap(([, patterns]) => namesOf(metrics, patterns)));
    const wanted = [...metrics.columns.keys()]
      .sort()
      .filter((name) => (filter.value ? name.includes(filter.value) : !usual.has(name)));
    for (const name of wanted) {
      if (!drawn.has(name))
        drawn.set(
          name,
          lineChart(
            name,
            () => [{ name, steps: getMetrics().steps, values: getMetrics().columns.get(name) ?? [] }],
            settings,
            openStep,
          ).element,
        );
    }
    replace(
      rest,
      wanted.map((name) => drawn.get(name)),
    );
    settings.draw();
  }
  const others = h("details", {}, h("summary", {}, t("All other metrics")), rest);
  others.addEventListener("toggle", drawMore);
  filter.addEventListener("input", () => {
    others.open = true;
  });
  return [
    h(
      "div",
      { class: "toolbar" },
      h("label", {}, t("Smoothing"), " ", window_),
      h("label", {}, log, " ", t("Log axis")),
      whole,
      h("span", { class: "grow" }),
      filter,
    ),
    getMetrics().steps.length ? null : h("p", { class: "quiet" }, t("Nothing was measured yet.")),
    sections.slice(0, 1),
    h("div", { class: "charts" }, parts),
    rewards,
    sections.slice(1),
    h("div", { class: "charts" }, times),
    constants,
    others,
  ];
}

/** What samples got for what they wrote, over the run. */
async function drawRewards(id, section, openStep, address) {
  const { steps } = await get("run", id, "samples.json").catch(() => ({ steps: [] }));
  const rewarded = steps.filter((one) => one.reward.length);
  if (!rewarded.length) return;
  const box = h("div", { class: "charts" });
  replace(section, h("h2", {}, t("Is it hacking the reward?")), box);
  const openSample = ({ step, index }) => {
    location.hash = `${address}/step/${step}/${index}`;
  };
  replace(box, rewardMap(rewarded, openStep), rewardsByLength(rewarded, openSample));
}

function steps(detail, metrics, address) {
  const value = (name, step) => metrics.columns.get(name)?.[metrics.steps.indexOf(step)];
  const rows = [...detail.parts].reverse().map(([step, part]) => {
    const score = part ? [...metrics.columns.keys()].find((name) => name.startsWith(`${part}/mean@`)) : detail.curve;
    return [
      link(`${address}/step/${stepName(step, part)}`, t("step {}").replace("{}", step)),
      part ? t(part) : t("training"),
      number(value(score, step), 4),
      number(value(part ? `${part}/length` : "length/mean", step), 4),
      part ? "" : number(value("policy/entropy", step), 3),
    ];
  });
  if (!rows.length)
    return h("p", { class: "quiet" }, t("This run has written no trajectories (logging.trajectories)."));
  return table([t("Step"), "", detail.curve, t("Length"), t("Entropy")], rows);
}

function text(content) {
  return content ? h("pre", { class: "card" }, shown(content)) : h("p", { class: "quiet" }, t("There is none."));
}

async function logs(id, detail, name = detail.logs.includes("main.log") ? "main.log" : detail.logs[0], address) {
  const tabs = h(
    "div",
    { class: "toolbar" },
    detail.logs.map((log) => link(`${address}/logs/${encodeURIComponent(log)}`, shown(log))),
  );
  if (!name) return text("");
  const { lines } = await get("run", id, "log", `${name}.json`);
  const kind = (line) => (/ (ERROR|CRITICAL) /.test(line) ? "problem" : / WARNING /.test(line) ? "warning" : null);
  return [
    tabs,
    lines.length
      ? h(
          "pre",
          { class: "card" },
          lines.map((line) => h("span", { class: kind(line) }, shown(line, 2000), "\n")),
        )
      : h("p", { class: "quiet" }, t("The log is empty.")),
  ];
}

/** Nodes with their devices, by what each of them does; and, where the run is on the server's machine, its stacks. */
async function workers(id, detail, isServed, address) {
  const list = h("div", { class: "workers" });
  const stacks = h("div", {});
  const isRunning = detail.state === "running";

  function box(one) {
    const since = one.since && duration(Math.max(0, Date.now() / 1000 - one.since));
    const number_ = one.log
      ? link(`${address}/logs/${encodeURIComponent(one.log)}`, String(one.device))
      : String(one.device);
    const state = isRunning ? one.state : "ended";
    return h(
      "div",
      { class: `device ${isRunning ? one.state : ""}` },
      h("div", {}, h("b", {}, number_), " ", shown((one.roles ?? []).join(", ")), " ", h("span", { class: "chip" }, t(state))),
      h("div", { class: "quiet small" }, shown([one.call, since, `pid ${one.pid}`].filter(Boolean).join(" · "))),
      one.last_line ? h("div", { class: "quiet small cut", title: plain(one.last_line) }, shown(one.last_line, 200)) : null,
    );
  }

  async function look() {
    const found = await get("run", id, "workers.json");
    const nodes = new Map();
    for (const one of found.workers) {
      const name = `${one.node} (${one.address})`;
      nodes.set(name, [...(nodes.get(name) ?? []), one]);
    }
    const old = Math.max(0, Date.now() / 1000 - found.written);
    replace(
      list,
      found.workers.length
        ? h("p", { class: "quiet small" }, t("As of {ago} ago").replace("{ago}", duration(old)))
        : h("p", { class: "quiet" }, t("This run has no workers on a cluster.")),
      [...nodes].map(([name, own]) =>
        h("section", { class: "card machine" }, h("h2", {}, shown(name)), h("div", { class: "devices" }, own.map(box))),
      ),
    );
  }

  async function showStacks() {
    replace(stacks, h("p", { class: "quiet" }, "…"));
    const { processes } = await get("run", id, "stacks.json");
    replace(
      stacks,
      processes.length
        ? processes.map((one) =>
            h(
              "details",
              { class: "card" },
              h("summary", {}, shown(`${one.what}, pid ${one.pid}: ${one.doing}`)),
              h(
                "pre",
                {},
                one.threads.map(({ name, active, frames }) =>
                  shown([`${name}${active ? " (active)" : ""}`, ...frames.map((frame) => `    ${frame}`), ""].join("\n")),
                ),
              ),
            ),
          )
        : h("p", { class: "quiet" }, t("None of its processes is on the server's machine; `corral stacks` asks all nodes.")),
    );
  }

  list.addEventListener("look", look);
  await look();
  const button = h("button", { type: "button", onclick: showStacks }, t("Stacks of its processes"));
  return [list, isServed && isRunning ? h("div", { class: "toolbar" }, button) : null, stacks];
}

async function ledger(id, prompt, address) {
  const { dropped = {}, gaps = [], problems = [], clean, ...counts } = await get("run", id, "ledger.json");
  if (clean === undefined && !problems.length) return text("");
  const field = h("input", {
    type: "number",
    min: 0,
    value: prompt ?? "",
    "aria-label": t("Prompt"),
    "data-filter": true,
  });
  const form = h(
    "form",
    { class: "toolbar" },
    h("label", {}, t("History of prompt"), " ", field),
    h("button", {}, t("Open")),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    location.hash = `${address}/ledger/${Number(field.value)}`;
  });
  const rows = [
    ...Object.entries(counts),
    ...Object.entries(dropped).map(([reason, count]) => [`${t("dropped")}: ${reason}`, count]),
  ];
  const history =
    prompt === undefined
      ? null
      : await get("run", id, "prompt", `${prompt}.json`).then(
          (found) =>
            h(
              "ol",
              { class: "card" },
              found.history.length ? found.history.map((line) => h("li", {}, shown(line))) : t("It was never issued."),
            ),
          (error) => h("p", { class: "problem" }, shown(error.message)),
        );
  return [
    form,
    history,
    table(
      [],
      rows.map(([name, count]) => [t(name), String(count)]),
    ),
    h("p", { class: clean ? "good" : "problem" }, t(clean ? "clean" : "not clean")),
    [...problems, ...(gaps.length ? [`gaps: ${gaps.slice(0, 20).join(", ")}`] : [])].map((one) =>
      h("p", { class: "problem" }, shown(one)),
    ),
  ];
}
