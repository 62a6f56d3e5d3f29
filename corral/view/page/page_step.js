// A step: its groups as rows of samples, its pairs or its rows; the distribution of what they got; filters.

import { histogram, ratioByTenth, rewardRange } from "./bars.js";
import { get, getKept } from "./data.js";
import { h, link, number, plain, replace, shown, table } from "./dom.js";
import { t } from "./language.js";

const AT_ONCE = 200;
const WORDS = 90; // characters of a reply's beginning and of its end
const MOST_RATIOS = 10;
const ROUNDING = 1e-3; // of ratios: what is nearer to 1 says nothing

/** What is shown of a step: samples in groups; pairs of answers (dpo, ipo, simpo); or answers of rows (sft). `value` is
 * what a group is sorted and counted by. */
const KINDS = {
  groups: {
    nouns: ["samples", "groups"],
    value: (group) => group.mean,
    title: "Distribution of rewards",
    values: (groups) => rewardsOf(groups.flatMap((group) => group.samples)),
    facts: (groups, samples) => [
      ["mean reward", number(meanOf(rewardsOf(samples)), 4)],
      ["zero-variance groups", groups.filter((group) => group.samples.length > 1 && group.spread === 0).length],
      ["errors", samples.filter((one) => one.error).length],
      ["repeats", percentOf(meanOf(samples.map((one) => one.repeats).filter((value) => typeof value === "number")))],
    ],
    sorts: {
      prompt: (group) => group.id,
      "mean reward": (group) => -(group.mean ?? -Infinity),
      "spread of rewards": (group) => -group.spread,
      "longest sample": (group) => -Math.max(...group.samples.map(lengthOf)),
      "slowest sample": (group) => -Math.max(...group.samples.map(secondsOf)),
      "largest ratio": (group) => -Math.max(...group.samples.map(driftOf)),
      "most repeats": (group) => -Math.max(...group.samples.map((one) => one.repeats ?? 0)),
    },
  },
  pairs: {
    nouns: ["answers", "pairs"],
    value: marginOf,
    title: "Distribution of margins",
    values: (groups) => groups.map(marginOf).filter((value) => value !== null),
    facts: (groups, samples) => {
      const margins = groups.map(marginOf).filter((value) => value !== null);
      const reward = (isChosen) => meanOf(rewardsOf(samples.filter((one) => one.is_chosen === isChosen)));
      return [
        ["accuracy", number(meanOf(margins.map((margin) => (Math.sign(margin) + 1) / 2)), 3)],
        ["mean margin", number(meanOf(margins), 4)],
        ["implicit reward of the chosen", number(reward(true), 4)],
        ["implicit reward of the rejected", number(reward(false), 4)],
      ];
    },
    sorts: { prompt: (group) => group.id, "smallest margin": (group) => marginOf(group) ?? Infinity },
  },
  rows: {
    nouns: ["rows", ""],
    value: (group) => lossOf(group.samples[0]),
    title: "Distribution of losses per token",
    values: (groups) => groups.map((group) => lossOf(group.samples[0])).filter((value) => value !== null),
    facts: (groups, samples) => {
      const known = samples.filter((one) => lossOf(one) !== null);
      const sum = (of) => known.reduce((total, one) => total + of(one), 0);
      const loss = known.length ? -sum((one) => one.trained_logprob) / sum(lengthOf) : null;
      return [["trained tokens", samples.reduce((total, one) => total + lengthOf(one), 0)], ["loss per token", number(loss, 4)]];
    },
    sorts: { prompt: (group) => group.id, "largest loss": (group) => -(lossOf(group.samples[0]) ?? -Infinity) },
  },
};

function kindOf(samples) {
  if (samples.some((one) => typeof one.is_chosen === "boolean")) return "pairs";
  const isOfRows = samples.every((one) => one.reward === null && !one.error && !one.left_out && one.num_turns === 0);
  return isOfRows && samples.length ? "rows" : "groups";
}

/** By how much the chosen answer's implicit reward is above the other one's; null: nothing was trained on them. */
function marginOf(group) {
  const known = group.samples.filter((one) => typeof one.trained_logprob === "number"); // not in earlier releases
  const [chosen, rejected] = [true, false].map((which) => known.find((one) => one.is_chosen === which));
  return chosen && rejected ? chosen.reward - rejected.reward : null;
}

function lossOf(sample) {
  return typeof sample.trained_logprob === "number" ? -sample.trained_logprob / lengthOf(sample) : null;
}

function secondsOf(sample) {
  return (sample.total_generate_s ?? 0) + (sample.total_environment_s ?? 0);
}

function driftOf(sample) {
  return typeof sample.worst_ratio === "number" ? Math.abs(Math.log(sample.worst_ratio)) : 0;
}

export function lengthOf(sample) {
  return sample.num_generated ?? sample.num_response_tokens ?? 0;
}

export async function stepPage(id, name) {
  const [{ trajectories }, detail] = await Promise.all([
    getKept("run", id, "step", `${name}.json`),
    get("run", id, "run.json"),
  ]);
  const address = `#/run/${encodeURIComponent(id)}`;
  const here = `${address}/step/${name}`;
  const { controls, matches, onChange } = filters(trajectories);
  const kind = kindOf(trajectories);
  const { nouns, value, title, values, facts, sorts } = KINDS[kind];
  const sort = h(
    "select",
    { "aria-label": t("Sort by"), onchange: draw },
    Object.keys(sorts).map((one) => h("option", { value: one }, t(one))),
  );
  const asList = h("input", { type: "checkbox", onchange: draw });
  const body = h("div");
  let most = AT_ONCE;

  function draw() {
    const kept = trajectories.filter(matches);
    const groups = groupsOf(kept).sort((one, other) => sorts[sort.value](one) - sorts[sort.value](other));
    const numbers = values(groups);
    const content = asList.checked
      ? listOf(groups.flatMap((group) => group.samples).slice(0, most), here)
      : groupTable(kind, groups.slice(0, most), here, value, rewardsOf(trajectories));
    const left = (asList.checked ? kept.length : groups.length) - most;
    replace(
      body,
      h(
        "div",
        { class: "facts" },
        fact(t(nouns[0]), kept.length),
        kind === "rows" ? null : fact(t(nouns[1]), groups.length),
        facts(groups, kept).map(([name, number_]) => fact(t(name), number_)),
        slowest(kept, here),
        numbers.length ? h("div", {}, h("div", { class: "quiet small" }, t(title)), histogram(numbers)) : null,
      ),
      worstRatios(kept, here),
      content,
      left > 0
        ? h(
            "button",
            {
              type: "button",
              onclick: () => {
                most += 5 * AT_ONCE;
                draw();
              },
            },
            `${t("more")} (${left})`,
          )
        : null,
    );
  }
  onChange(draw);
  draw();
  const go = (by) => {
    const names = detail.parts.map(([step, part]) => (part ? `${step}.${part}` : String(step)));
    const next = names[names.indexOf(name) + by];
    if (next !== undefined) location.hash = `${address}/step/${next}`;
  };
  const [step, part] = name.split(".");
  return {
    title: `${id} · ${name}`,
    trail: [
      [id, address],
      [`${t("step {}").replace("{}", step)}${part ? ` · ${t(part)}` : ""}`, here],
    ],
    content: [
      h(
        "div",
        { class: "toolbar" },
        h("h1", {}, t("Step {}").replace("{}", step)),
        part ? h("span", { class: "chip" }, t(part)) : null,
        h("button", { type: "button", class: "plain", title: "k", onclick: () => go(-1) }, "←"),
        h("button", { type: "button", class: "plain", title: "j", onclick: () => go(1) }, "→"),
      ),
      h(
        "div",
        { class: "toolbar" },
        controls,
        h("label", {}, t("Sort by"), " ", sort),
        h("label", {}, asList, " ", t("as a list")),
      ),
      body,
    ],
    keys: { j: ["next step", () => go(1)], k: ["step before", () => go(-1)] },
  };
}

function filters(trajectories) {
  const of = (name) =>
    [
      ...new Set(
        trajectories.map((one) => one[name]).filter((value) => value !== null && value !== undefined && value !== ""),
      ),
    ].sort();
  const select = (label, values) =>
    h(
      "select",
      { "aria-label": label, hidden: values.length < 2 },
      h("option", { value: "" }, label),
      values.map((value) => h("option", { value }, plain(value))),
    );
  const field = (label) =>
    h("input", { type: "number", step: "any", class: "narrow", placeholder: label, "aria-label": label });
  const text = h("input", {
    type: "search",
    placeholder: t("Text in the reply"),
    "aria-label": t("Text in the reply"),
    "data-filter": true,
  });
  const [stop, tag, leftOut] = [
    select(t("any stop reason"), of("stop")),
    select(t("any environment"), of("tag")),
    select(t("trained or not"), of("left_out")),
  ];
  const [low, high, short, long] = [
    field(t("reward ≥")),
    field(t("reward ≤")),
    field(t("length ≥")),
    field(t("length ≤")),
  ];
  const within = (value, from, to) =>
    (from.value === "" || value >= Number(from.value)) && (to.value === "" || value <= Number(to.value));
  const all = [text, stop, tag, leftOut, low, high, short, long];
  const matches = (one) =>
    (!text.value ||
      String(one.preview ?? "")
        .toLowerCase()
        .includes(text.value.toLowerCase())) &&
    [
      [stop, "stop"],
      [tag, "tag"],
      [leftOut, "left_out"],
    ].every(([control, name]) => !control.value || one[name] === control.value) &&
    ((low.value === "" && high.value === "") || (typeof one.reward === "number" && within(one.reward, low, high))) &&
    within(lengthOf(one), short, long);
  return {
    controls: all,
    matches,
    onChange: (draw) => all.forEach((control) => control.addEventListener("input", draw)),
  };
}

function groupsOf(samples) {
  const groups = new Map();
  for (const one of samples) {
    const key = one.prompt_id ?? one.index;
    if (!groups.has(key)) groups.set(key, { id: key, samples: [] });
    groups.get(key).samples.push(one);
  }
  for (const group of groups.values()) {
    const rewards = rewardsOf(group.samples);
    group.mean = meanOf(rewards);
    group.spread = rewards.length ? Math.max(...rewards) - Math.min(...rewards) : 0;
    const [best, worst] = [1, -1].map((sign) =>
      group.samples.reduce((one, other) => (sign * (other.reward ?? NaN) > sign * (one.reward ?? NaN) ? other : one)),
    );
    group.ends = best === worst || group.spread === 0 ? [best] : [best, worst];
    group.samples.sort((one, other) => (one.sample ?? 0) - (other.sample ?? 0));
  }
  return [...groups.values()];
}

function meanOf(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function percentOf(fraction) {
  return typeof fraction === "number" ? `${number(100 * fraction, 2)} %` : "";
}

function fact(name, value) {
  return h("div", {}, h("div", { class: "quiet small" }, name), h("strong", {}, value));
}

/** How long samples took, of which the slowest one holds up the step. */
function slowest(samples, here) {
  return ["generate_s", "environment_s"].map((name) => {
    const seconds = (one) => one[`total_${name}`] ?? 0;
    const sorted = [...samples].sort((one, other) => seconds(one) - seconds(other));
    const last = sorted.at(-1);
    if (!last || !seconds(last)) return null;
    const median = number(seconds(sorted[Math.floor(sorted.length / 2)]), 3);
    return fact(`${t(name)}: ${t("median, slowest")}`, [
      `${median} s, `,
      link(`${here}/${last.index}`, `${number(seconds(last), 3)} s`),
    ]);
  });
}

/** The tokens at which the policy was farthest from the one that sampled them, the worst of each sample. */
function worstRatios(samples, here) {
  const worst = samples.filter((one) => driftOf(one) > ROUNDING).sort((one, other) => driftOf(other) - driftOf(one)).slice(0, MOST_RATIOS);
  if (!worst.length) return null;
  return h(
    "details",
    {},
    h("summary", {}, `${t("Tokens with the largest ratio")}: ${number(worst[0].worst_ratio, 3)} …`),
    h("div", { class: "charts" }, ratioByTenth(samples)),
    table(
      [t("ratio trainer / engine"), t("token"), t("position in the reply"), t("prompt"), t("sample")],
      worst.map((one) => [
        number(one.worst_ratio, 4),
        h("span", { class: "quoted" }, shown(JSON.stringify(one.worst_ratio_text ?? ""), 60)),
        link(`${here}/${one.index}/conversation/${one.num_prompt_tokens + one.worst_ratio_at}`, String(one.worst_ratio_at)),
        String(one.prompt_id),
        String(one.sample),
      ]),
    ),
  );
}

/** Samples as cells that link to them. Their colors are on the scale of `rewards`, all of the step. */
export function sampleCells(samples, hrefOf, rewards, current, labelOf = (one) => number(one.reward, 3)) {
  const [low, high] = rewardRange(rewards);
  return h(
    "div",
    { class: "samples" },
    samples.map((one) => {
      const about = [
        `${t("sample")} ${one.sample ?? one.index}`,
        `${t("reward")} ${number(one.reward, 4)}`,
        `${lengthOf(one)} ${t("tokens")}`,
        one.repeats ? `${t("repeats")} ${percentOf(one.repeats)}` : null,
        one.stop,
        one.left_out,
        one.error,
        one.preview,
      ];
      const cell = h(
        "a",
        {
          href: hrefOf(one),
          class: `sample${one.error ? " failed" : ""}${one.left_out ? " left-out" : ""}`,
          "aria-current": one.index === current ? "page" : null,
          title: plain(about.filter(Boolean).join("\n")),
        },
        labelOf(one),
      );
      cell.style.setProperty(
        "--place",
        `${Math.round(100 * (typeof one.reward === "number" ? (one.reward - low) / (high - low) : 0.5))}%`,
      );
      return cell;
    }),
  );
}

export function rewardsOf(samples) {
  return samples.map((one) => one.reward).filter((reward) => typeof reward === "number");
}

function groupTable(kind, groups, here, value, rewards) {
  const address = (one) => `${here}/${one.index}`;
  const words = (one, label) => h("div", { class: "small words" }, link(address(one), label), " ", wordsOf(one));
  const shownOf = {
    groups: (group) => [
      sampleCells(group.samples, address, rewards),
      group.ends.map((one) => words(one, number(one.reward, 3))),
      group.samples
        .filter((one) => one.error)
        .slice(0, 1)
        .map((one) => h("div", { class: "small problem" }, shown(one.error, 200))),
    ],
    pairs: (group) =>
      group.samples.map((one) => words(one, `${t(one.is_chosen ? "chosen" : "rejected")} ${number(one.reward, 3)}`)),
    rows: (group) => group.samples.map((one) => words(one, `${lengthOf(one)} ${t("tokens")}`)),
  }[kind];
  const head = {
    groups: ["mean reward", "question, samples, best and worst reply"],
    pairs: ["margin", "question, chosen and rejected answer"],
    rows: ["loss per token", "question and trained answer"],
  }[kind];
  return table(
    [t("prompt"), ...head.map(t)],
    groups.map((group) => [
      link(`${address(group.samples[0])}${group.samples.length > 1 ? "/tree" : ""}`, String(group.id)),
      h(
        "td",
        {},
        number(value(group), 3),
        kind === "groups" && group.samples.length > 1 && group.spread === 0
          ? h("div", { class: "quiet small" }, t("zero variance"))
          : null,
      ),
      h("td", { class: "broad" }, askedOf(group.samples[0]), shownOf(group)),
    ]),
    { class: "groups" },
  );
}

/** The question and the reference answer of a sample, where its file has them. */
export function askedOf(sample, longest = 160) {
  return [
    sample.question ? h("div", { class: "asked" }, shown(sample.question, longest)) : null,
    typeof sample.answer === "string"
      ? h("div", { class: "small asked" }, h("span", { class: "quiet" }, `${t("reference answer")} `), shown(sample.answer, longest))
      : null,
  ];
}

/** The first and the last words of a reply. */
function wordsOf({ preview, ending }) {
  const [first, last] = [preview ?? "", ending ?? ""];
  if (first === last || !last) return h("span", { class: "quoted" }, shown(first));
  return [
    h("span", { class: "quoted" }, shown(first.slice(0, WORDS))),
    h("span", { class: "quiet" }, " … "),
    h("span", { class: "quoted" }, shown(last.slice(-WORDS))),
  ];
}

function listOf(samples, here) {
  return table(
    [t("prompt"), t("sample"), t("reward"), t("tokens"), t("repeats"), t("stop"), t("reply")],
    samples.map((one) => [
      String(one.prompt_id ?? ""),
      link(`${here}/${one.index}`, String(one.sample ?? one.index)),
      number(one.reward, 4),
      String(lengthOf(one)),
      percentOf(one.repeats),
      h(
        "td",
        {},
        shown(one.stop),
        one.left_out ? h("div", { class: "quiet small" }, shown(one.left_out)) : null,
        one.error ? h("div", { class: "problem small" }, shown(one.error, 200)) : null,
      ),
      h("td", { class: "reply" }, shown(one.preview, 300)),
    ]),
  );
}
