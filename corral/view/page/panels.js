// Which metrics are drawn together, and how rows of metrics.jsonl become series.

const HELD_OUT = /^validation\/mean@/;
export const PANELS = [
  ["Reward", [/^reward\/mean$/, /^reward\/best$/]],
  ["Held-out score", [HELD_OUT, /^validation\/pass@/]],
  ["Loss", [/^policy\/nll$/, /^preference\/loss$/, /^validation\/loss$/]],
  ["Preferences", [/^preference\/(accuracy|margin)$/]],
  ["Entropy", [/^policy\/entropy$/]],
  ["KL", [/^kl\/mean$/, /^policy\/approx_kl$/]],
  ["Ratio and mismatch", [/^policy\/(ratio_deviation|mismatch_max|mismatch_kl)$/]],
  ["Clipped tokens", [/^policy\/clipped$/]],
  ["Gradient norm", [/^policy\/gradient_norm$/]],
  ["Length", [/^length\/(mean|max)$/]],
  ["Staleness", [/^staleness\/(mean|max)$/]],
  ["Rewards by name", [/^reward\/.+\/mean$/]],
  ["Success", [/^environment\/(.+\/)?success$/, /^validation\/environment\/(.+\/)?success$/]],
  ["Why samples ended", [/^stop\//]],
  ["Samples", [/^samples\/(errors|dropped|failed|equal_groups|dropped_groups|masked)$/]],
  ["Tokens per second", [/^speed\//]],
  ["Memory and devices", [/^(memory|device)\//]],
];
export const TIMES = ["rollout", "logprobs", "train", "transfer", "validate"];

/** The metrics of a run, to which rows are added while it is trained. */
export function metricsOf(detail) {
  const metrics = { steps: [...detail.metrics.steps], columns: new Map(Object.entries(detail.metrics.columns)) };
  metrics.add = (row) => {
    if (!metrics.steps.includes(row.step)) {
      metrics.steps.push(row.step);
      for (const values of metrics.columns.values()) values.push(null);
    }
    const at = metrics.steps.indexOf(row.step);
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

export function seriesOf(metrics, patterns, prefix = "") {
  const names = namesOf(metrics, patterns);
  const series = names.map((name) => ({
    name: prefix + name,
    steps: metrics.steps,
    values: metrics.columns.get(name),
    ci: HELD_OUT.test(name) ? metrics.columns.get("validation/ci95") : undefined,
  }));
  if (!prefix && names.some((name) => HELD_OUT.test(name))) {
    for (const baseline of ["random", "optimal"]) {
      const level = (metrics.columns.get(`validation/${baseline}/reward`) ?? [])
        .filter((value) => value !== null)
        .at(-1);
      if (level !== undefined) series.push({ name: baseline, level: true, values: [level] });
    }
  }
  return series;
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
