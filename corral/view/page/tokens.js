// Tokens with their numbers: which columns a trajectory has, colors for them, and spans with values.

import { rewardRange } from "./bars.js";
import { h, number, plain, shown } from "./dom.js";
import { t } from "./language.js";

const NAMES = {
  logprobs: "log-prob in the engine",
  old_logprobs: "log-prob in the trainer",
  trained_logprobs: "log-prob when it was trained on",
  ratio: "ratio trainer / engine",
  advantages: "advantage",
  entropies: "entropy",
  reference_logprobs: "log-prob in the reference",
  versions: "version of the weights",
  generated: "mask: generated or not",
};
const NO_COLUMNS = /^turn_|_s$|_(tokens|pieces|chars)$/; // lists that are not one number for each token
const RED = [220, 38, 38];
const BLUE = [37, 99, 235];
const ORANGE = [234, 88, 12];
const PALETTE = [
  BLUE,
  ORANGE,
  [22, 163, 74],
  [147, 51, 234],
  [202, 138, 4],
  [219, 39, 119],
  [8, 145, 178],
  [100, 116, 139],
];
const AT_ONCE = 4000;
const RATIOS = ["ratio", "correction"];
const FULL = { logprobs: 5, entropies: 4, advantages: 2 }; // what has the full color; other columns go by their size

/** One entry for each token of prompt and reply: its text, id and values, and whether it was generated. */
export function tokensOf(record) {
  const [prompt, reply] = [record.prompt_tokens ?? [], record.response_tokens ?? []];
  const columns = columnsOf(record, prompt.length, reply.length);
  const texts = [
    ...(record.prompt_pieces ?? prompt.map((id) => `[${id}]`)),
    ...(record.response_pieces ?? reply.map((id) => `[${id}]`)),
  ];
  return [...prompt, ...reply].map((id, index) => ({
    id,
    index,
    text: texts[index],
    isPrompt: index < prompt.length,
    isGenerated: index >= prompt.length && columns.get("generated")?.[index - prompt.length] !== 0,
    values: new Map(
      index < prompt.length ? [] : [...columns].map(([name, values]) => [name, values[index - prompt.length]]),
    ),
  }));
}

/** Lists of numbers that are as long as the reply, or as prompt and reply together, whatever their names. */
function columnsOf(record, numPrompt, numReply) {
  const columns = new Map();
  for (const [name, values] of Object.entries(record)) {
    if (!Array.isArray(values) || !numReply || NO_COLUMNS.test(name)) continue;
    if (!values.every((value) => value === null || typeof value === "number")) continue;
    const own =
      values.length === numReply ? values : values.length === numPrompt + numReply ? values.slice(numPrompt) : null;
    if (own)
      columns.set(
        name,
        own.map((value) => value ?? NaN),
      );
  }
  const trained = columns.get("trained_logprobs") ?? columns.get("old_logprobs");
  if (trained && columns.has("logprobs"))
    columns.set(
      "ratio",
      trained.map((value, index) => Math.exp(value - columns.get("logprobs")[index])),
    );
  const order = Object.keys(NAMES);
  return new Map(
    [...columns].sort(([one], [other]) => ((order.indexOf(one) + 99) % 99) - ((order.indexOf(other) + 99) % 99)),
  );
}

export function columnNames(tokens) {
  return [...new Set(tokens.flatMap((token) => [...token.values.keys()]))];
}

export function nameOf(column) {
  return NAMES[column] ? t(NAMES[column]) : plain(column);
}

/** A function from a token to a color, with its legend: [[color, text], ...]. Scales are the same in every view. */
export function colorsFor(column, tokens) {
  const values = tokens
    .filter((token) => token.isGenerated)
    .map((token) => token.values.get(column))
    .filter(Number.isFinite);
  const paint = (color, strength) =>
    `rgb(${color.join(" ")} / ${(0.75 * Math.min(1, Math.max(0, strength))).toFixed(3)})`;
  const valued = (color) => (token) => {
    const value = token.values.get(column);
    return token.isGenerated && Number.isFinite(value) ? color(value) : "";
  };
  if (column === "generated")
    return {
      color: (token) => (token.isGenerated ? paint(BLUE, 0.5) : token.isPrompt ? "" : paint(ORANGE, 0.4)),
      legend: [
        [paint(BLUE, 0.5), t("generated")],
        [paint(ORANGE, 0.4), t("observation")],
      ],
    };
  if (column === "versions") {
    const versions = [...new Set(values)].sort((one, other) => one - other);
    return {
      color: valued((value) => paint(PALETTE[versions.indexOf(value) % PALETTE.length], 0.6)),
      legend: versions
        .slice(0, 8)
        .map((version, index) => [paint(PALETTE[index % PALETTE.length], 0.6), String(version)]),
    };
  }
  const isRatio = RATIOS.includes(column);
  const most = isRatio ? Math.log(2) : (FULL[column.replace(/^.*logprobs$/, "logprobs")] ?? rewardRange(values.map(Math.abs))[1]);
  if (isRatio || ["advantages", "values", "returns"].includes(column)) {
    const size = (value) => (isRatio ? Math.log(value) : value) / most;
    const ends = isRatio ? [0.5, 1, 2] : [-most, 0, most];
    return {
      color: valued((value) => paint(size(value) < 0 ? ORANGE : BLUE, Math.abs(size(value)))),
      legend: [[paint(ORANGE, 1), `≤ ${ends[0]}`], ["", String(ends[1])], [paint(BLUE, 1), `≥ ${ends[2]}`]],
    };
  }
  const sign = column.includes("logprob") ? -1 : 1;
  return {
    color: valued((value) => paint(RED, Math.abs(value) / most)),
    legend: [["", "0"], [paint(RED, 0.5), String((sign * most) / 2)], [paint(RED, 1), `${sign < 0 ? "≤" : "≥"} ${sign * most}`]],
  };
}

export function legendOf(legend) {
  return h(
    "span",
    { class: "scale" },
    legend.map(([color, text]) => {
      const box = h("span", { class: "swatch" });
      box.style.backgroundColor = color;
      return [box, h("span", { class: "small" }, text)];
    }),
  );
}

export function tokenSpan(token, color, kind = "") {
  const text = token.text === "" ? "·" : token.text;
  const span = h(
    "span",
    { class: `token ${kind}`, "data-token": token.index },
    text.includes("\n") ? shown(text.replaceAll("\n", "⏎\n")) : shown(text, 400),
  );
  span.style.backgroundColor = color(token);
  return span;
}

/** The spans of many tokens; those behind AT_ONCE when they are asked for. */
export function tokenSpans(tokens, color, kindOf = () => "") {
  const spans = tokens.slice(0, AT_ONCE).map((token) => tokenSpan(token, color, kindOf(token)));
  if (tokens.length > AT_ONCE) {
    const more = h("button", { type: "button", class: "link" }, `… ${tokens.length - AT_ONCE} ${t("tokens")}`);
    more.addEventListener("click", () => more.replaceWith(...tokenSpans(tokens.slice(AT_ONCE), color, kindOf)));
    spans.push(more);
  }
  return spans;
}

/** What stands under the pointer, in words. */
export function describeToken(token) {
  const values = [...token.values].map(([name, value]) =>
    h("span", {}, `${nameOf(name)} `, h("b", {}, number(value, 6))),
  );
  return [
    h("span", { class: "quoted" }, shown(JSON.stringify(token.text), 60)),
    h("span", {}, `id ${token.id}`),
    h("span", {}, `${t("position")} ${token.index}`),
    values,
  ];
}

/** Runs of tokens of one kind: the prompt, what was generated turn by turn, observations between. */
export function segmentsOf(tokens) {
  const segments = [];
  let turn = 0;
  for (const token of tokens) {
    const kind = token.isPrompt ? "prompt" : token.isGenerated ? "turn" : "observation";
    if (segments.at(-1)?.kind !== kind) {
      if (kind === "turn") turn += 1;
      segments.push({ kind, turn, tokens: [] });
    }
    segments.at(-1).tokens.push(token);
  }
  return segments;
}

/** Index of the first token in which two sequences differ. */
export function firstDifference(one, other) {
  const length = Math.min(one.length, other.length);
  for (let index = 0; index < length; index += 1) if (one[index].id !== other[index].id) return index;
  return length;
}

/** The samples of a group as one tree: each node is a run of tokens that its samples share. */
export function treeOf(samples, start = 0) {
  const [first] = samples;
  let end = start;
  const goesOn = () =>
    end < first.tokens.length && samples.every((one) => one.tokens[end]?.id === first.tokens[end].id);
  while (goesOn()) end += 1;
  const branches = new Map();
  const ended = [];
  for (const one of samples) {
    if (end >= one.tokens.length) ended.push(one);
    else branches.set(one.tokens[end].id, [...(branches.get(one.tokens[end].id) ?? []), one]);
  }
  return {
    tokens: first.tokens.slice(start, end),
    ended,
    children: [...branches.values()].map((own) => treeOf(own, end)),
  };
}
