// A step: its groups as rows of samples, the distribution of rewards, filters.

import { histogram } from "./bars.js";
import { get, getKept } from "./data.js";
import { h, link, number, plain, replace, shown, table } from "./dom.js";
import { t } from "./language.js";

const AT_ONCE = 200;
const WORDS = 90; // characters of a reply's beginning and of its end
const SORTS = {
  prompt: (group) => group.id,
  "mean reward": (group) => -(group.mean ?? -Infinity),
  "spread of rewards": (group) => -group.spread,
  "longest sample": (group) => -Math.max(...group.samples.map(lengthOf)),
};

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
  const sort = h(
    "select",
    { "aria-label": t("Sort by"), onchange: draw },
    Object.keys(SORTS).map((one) => h("option", { value: one }, t(one))),
  );
  const asList = h("input", { type: "checkbox", onchange: draw });
  const body = h("div");
  let most = AT_ONCE;

  function draw() {
    const kept = trajectories.filter(matches);
    const rewards = rewardsOf(kept);
    const groups = groupsOf(kept).sort((one, other) => SORTS[sort.value](one) - SORTS[sort.value](other));
    const content = asList.checked
      ? listOf(groups.flatMap((group) => group.samples).slice(0, most), here)
      : groupTable(groups.slice(0, most), here, address, detail);
    const left = (asList.checked ? kept.length : groups.length) - most;
    replace(
      body,
      h(
        "div",
        { class: "facts" },
        fact(t("samples"), kept.length),
        fact(t("groups"), groups.length),
        fact(t("mean reward"), number(meanOf(rewards), 4)),
        fact(
          t("zero-variance groups"),
          groups.filter((group) => group.samples.length > 1 && group.spread === 0).length,
        ),
        fact(t("errors"), kept.filter((one) => one.error).length),
        rewards.length
          ? h("div", {}, h("div", { class: "quiet small" }, t("Distribution of rewards")), histogram(rewards))
          : null,
      ),
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
      [`${t("step")} ${step}${part ? ` · ${t(part)}` : ""}`, here],
    ],
    content: [
      h(
        "div",
        { class: "toolbar" },
        h("h1", {}, `${t("Step")} ${step}`),
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

function fact(name, value) {
  return h("div", {}, h("div", { class: "quiet small" }, name), h("strong", {}, String(value)));
}

/** Samples as cells that link to them, colored by where their reward is among `rewards`. */
export function sampleCells(samples, hrefOf, rewards, current, labelOf = (one) => number(one.reward, 3)) {
  const [low, high] = rewards.reduce(
    ([least, most], reward) => [Math.min(least, reward), Math.max(most, reward)],
    [Infinity, -Infinity],
  );
  return h(
    "div",
    { class: "samples" },
    samples.map((one) => {
      const about = [
        `${t("sample")} ${one.sample ?? one.index}`,
        `${t("reward")} ${number(one.reward, 4)}`,
        `${lengthOf(one)} ${t("tokens")}`,
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
        `${Math.round(100 * (typeof one.reward === "number" && high > low ? (one.reward - low) / (high - low) : 0.5))}%`,
      );
      return cell;
    }),
  );
}

export function rewardsOf(samples) {
  return samples.map((one) => one.reward).filter((reward) => typeof reward === "number");
}

function groupTable(groups, here, address, detail) {
  const rewards = rewardsOf(groups.flatMap((group) => group.samples));
  const isTraining = !here.includes(".");
  return table(
    [t("prompt"), t("mean reward"), t("question, samples, best and worst reply")],
    groups.map((group) => [
      isTraining && detail.ledger ? link(`${address}/ledger/${group.id}`, String(group.id)) : String(group.id),
      h(
        "td",
        {},
        number(group.mean, 3),
        group.samples.length > 1 && group.spread === 0 ? h("div", { class: "quiet small" }, t("zero variance")) : null,
      ),
      h(
        "td",
        {},
        askedOf(group.samples[0]),
        sampleCells(group.samples, (one) => `${here}/${one.index}`, rewards),
        group.ends.map((one) =>
          h("div", { class: "small words" }, link(`${here}/${one.index}`, number(one.reward, 3)), " ", wordsOf(one)),
        ),
      ),
    ]),
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
    [t("prompt"), t("sample"), t("reward"), t("tokens"), t("stop"), t("reply")],
    samples.map((one) => [
      String(one.prompt_id ?? ""),
      link(`${here}/${one.index}`, String(one.sample ?? one.index)),
      number(one.reward, 4),
      String(lengthOf(one)),
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
