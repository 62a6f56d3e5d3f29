// Which metrics are drawn together, how rows of metrics.jsonl become series, and what they say of a run in a sentence.

import { number } from "./dom.js";
import { t } from "./language.js";

const HELD_OUT = /^validation\/mean@/;
export const SECTIONS = [
  [
    "Is it learning?",
    [
      ["Reward", [/^reward\/mean$/, /^reward\/best$/]],
      ["Held-out score", [HELD_OUT, /^validation\/pass@/]],
      ["Groups without a gradient", [/^samples\/equal_groups$/]],
      ["Rewards by name", [/^reward\/.+\/mean$/]],
      ["Success", [/^environment\/(.+\/)?success$/, /^validation\/environment\/(.+\/)?success$/]],
      ["Loss", [/^policy\/nll$/, /^preference\/loss$/, /^validation\/loss$/]],
      ["Pairs with the chosen answer ahead", [/^(preference|validation)\/accuracy$/]],
      ["Implicit rewards", [/^preference\/margin$/, /^preference\/(chosen|rejected)_reward$/]],
    ],
  ],
  [
    "What does it write?",
    [
      ["Length", [/^length\/mean$/, /^length\/max$/]],
      ["Why samples ended", [/^stop\/length$/, /^stop\/(?!length$)/]],
      ["Repeats", [/^samples\/repeats$/]],
      ["Samples", [/^samples\/(errors|dropped|failed|dropped_groups|masked)$/]],
    ],
  ],
  [
    "How does the policy move?",
    [
      ["Entropy", [/^policy\/entropy$/]],
      ["KL", [/^kl\/mean$/, /^policy\/(approx_kl|mismatch_kl)$/]],
      ["Largest distance of a ratio from 1", [/^policy\/ratio_deviation$/, /^policy\/mismatch_max$/]],
      ["Clipped tokens", [/^policy\/clipped$/]],
      ["Gradient norm", [/^policy\/gradient_norm$/]],
      ["Staleness", [/^staleness\/mean$/, /^staleness\/max$/]],
    ],
  ],
  [
    "How fast is it?",
    [
      ["Tokens per second", [/^speed\/tokens_per_s$/, /^speed\/(?!tokens_per_s$)/]],
      ["Memory (GiB)", [/^memory\//]],
    ],
  ],
];
export const PANELS = SECTIONS.flatMap(([, panels]) => panels);
export const TIMES = ["rollout", "logprobs", "train", "transfer", "validate"];
const NEVER_FOLDED = /^(reward\/mean$|validation\/)/;
const FEW = 3; // values: with less, nothing is called constant
const LAST = 10; // steps

/** The metrics of a run, to which rows are added while it is trained. */
export function metricsOf({ steps, columns }) {
  const metrics = { steps: [...steps], columns: new Map(Object.entries(columns)) };
  metrics.add = (row) => {
    if (metrics.steps.at(-1) !== row.step && !metrics.steps.includes(row.step)) {
      metrics.steps.push(row.step);
      for (const values of metrics.columns.values()) values.push(null);
    }
    const at = metrics.steps.lastIndexOf(row.step);
    for (const [name, value] of Object.entries(row)) {
      if (name === "step" || value === null) continue;
      if (!metrics.columns.has(name))
        metrics.columns.set(
          name,
          metrics.steps.map(() => null),
        );
      metrics.columns.get(name)[at] = value;
    }
  };
  return metrics;
}

export function namesOf(metrics, patterns) {
  return patterns.flatMap((pattern) => [...metrics.columns.keys()].filter((name) => pattern.test(name)).sort());
}

/** The series of a panel, without those that never change; equal ones are one. */
export function seriesOf(metrics, patterns) {
  const names = namesOf(metrics, patterns).filter((name) => constantOf(metrics, name) === undefined);
  const series = [];
  for (const name of names) {
    const values = valuesOf(metrics, name);
    const same = series.find((one) => one.values.every((value, index) => value === values[index]));
    if (same) same.name += ` = ${name}`;
    else
      series.push({
        name,
        steps: metrics.steps,
        values,
        ci: HELD_OUT.test(name) ? metrics.columns.get("validation/ci95") : undefined,
        isFraction: /^(validation\/(mean|pass)@|stop\/|samples\/(equal_groups|repeats)$)/.test(name) && isFraction(metrics, name),
      });
  }
  if (names.some((name) => HELD_OUT.test(name))) {
    for (const baseline of ["random", "optimal"]) {
      const level = measured(metrics, `validation/${baseline}/reward`).at(-1);
      if (level !== undefined) series.push({ name: t(baseline), level: true, values: [level] });
    }
  }
  return series;
}

/** A metric's value for each step. Reasons why samples ended are in the file only where there was one. */
function valuesOf(metrics, name) {
  const values = metrics.columns.get(name);
  if (!name.startsWith("stop/")) return values;
  const lengths = metrics.columns.get("length/mean") ?? [];
  return values.map((value, index) => value ?? (typeof lengths[index] === "number" ? 0 : null));
}

/** Whether a metric is a part of something, which is shown in percent: of scores, if all rewards are within 0 and 1. */
function isFraction(metrics, name) {
  const ends = HELD_OUT.test(name) ? ["validation/min", "validation/max"] : [];
  return [name, ...ends].flatMap((one) => measured(metrics, one)).every((value) => value >= 0 && value <= 1);
}

export function measured(metrics, name) {
  return (metrics.columns.get(name) ?? []).filter((value) => value !== null);
}

/** The value of a metric that has never changed; undefined: it has, or it is too early to tell. */
function constantOf(metrics, name) {
  if (NEVER_FOLDED.test(name)) return undefined;
  const values = measured(metrics, name);
  return values.length >= FEW && values.every((value) => value === values[0]) ? values[0] : undefined;
}

/** The metrics of the panels that never change, with their values. */
export function constantsOf(metrics) {
  return PANELS.flatMap(([, patterns]) => namesOf(metrics, patterns))
    .map((name) => [name, constantOf(metrics, name)])
    .filter(([, value]) => value !== undefined);
}

/** What the numbers say of the run: parts of a sentence, each with whether it is a warning. */
export function healthOf(metrics) {
  const ends = (name) => {
    const values = measured(metrics, name);
    const many = Math.min(LAST, Math.ceil(values.length / 2));
    return values.length ? [mean(values.slice(0, many)), mean(values.slice(-many)), values.length] : null;
  };
  const last = (name) => ends(name)?.[1];
  const percent = (fraction) => `${number(100 * fraction, 2)} %`;
  const said = (text, values, isWarning = false) => [
    text.replace(/\{(\w+)\}/g, (_, name) => values[name]),
    isWarning,
  ];
  const change = (name, word) => {
    const [from, to, steps] = ends(name) ?? [];
    const digits = { from: number(from, 3), to: number(to, 3), steps };
    return from === undefined ? null : said(`${word} {from} → {to}`, digits);
  };
  const found = [];
  const reward = ends("reward/mean");
  if (reward) {
    const [from, to, steps] = reward;
    const gain = `${to < from ? "−" : "+"}${number(Math.abs(to - from), 3)}`;
    found.push(
      said(
        t("reward {gain} in {steps} steps ({from} → {to})"),
        { gain, steps, from: number(from, 3), to: number(to, 3) },
        steps >= 2 * LAST && to <= from,
      ),
    );
  } else {
    found.push(change("policy/nll", t("loss")), change("preference/loss", t("loss")));
    found.push(change("preference/accuracy", t("accuracy")), change("preference/margin", t("margin")));
  }
  const equal = last("samples/equal_groups");
  if (equal !== undefined)
    found.push(said(t("{many} of the groups give no gradient"), { many: percent(equal) }, equal > 0.5));
  if (reward && metrics.columns.has("length/mean")) {
    const cut = last("stop/length") ?? 0;
    found.push(change("length/mean", t("length")), said(t("{cut} cut off"), { cut: percent(cut) }, cut > 0.1));
  }
  const [kl, ratio, failed] = ["policy/approx_kl", "policy/ratio_deviation", "samples/error_rate"].map(last);
  if (kl !== undefined)
    found.push(
      said(t("drift: KL {kl}, a ratio up to {ratio} from 1"), { kl: number(kl, 2), ratio: number(ratio, 2) }, kl > 0.05),
    );
  found.push(change("policy/entropy", t("entropy")));
  if (failed) found.push(said(t("{failed} of the samples failed"), { failed: percent(failed) }, true));
  return found.filter(Boolean);
}

export function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/** What each of several rewards adds to the sum: its mean of every step times its weight in the recipe. */
export function rewardPartsOf(metrics, recipe) {
  const parts = [...metrics.columns.keys()]
    .map((name) => [/^reward\/(.+)\/mean$/.exec(name)?.[1], name])
    .filter(([part]) => part !== undefined)
    .map(([part, name]) => {
      const key = Object.keys(recipe).find((own) => own.endsWith(`rewards.${part}.weight`));
      const weight = recipe[key] ?? 1;
      return { name: weight === 1 ? part : `${part} × ${weight}`, values: metrics.columns.get(name).map((value) => weight * (value ?? 0)) };
    });
  return { steps: metrics.steps, parts: parts.length > 1 ? parts : [] };
}

/** Seconds of each stage of every step; what no stage has measured is `other`. */
export function timesOf(metrics) {
  const column = (name) => metrics.columns.get(`time/${name}_s`);
  const kept = metrics.steps
    .map((_, index) => index)
    .filter((index) => column("step")?.[index] !== null && column("step") !== undefined);
  const parts = TIMES.filter(column).map((name) => ({ name, values: kept.map((index) => column(name)[index] ?? 0) }));
  const inStep = parts.filter((part) => part.name !== "validate");
  const other = kept.map((index, at) =>
    Math.max(0, column("step")[index] - inStep.reduce((sum, part) => sum + part.values[at], 0)),
  );
  if (kept.length) parts.push({ name: "other", values: other });
  return { steps: kept.map((index) => metrics.steps[index]), parts };
}
