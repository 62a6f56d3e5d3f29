// Stacked bars, histograms and sparklines as SVG.

import { axisMarks, COLORS, HEIGHT, MARGIN, max, min, ticks } from "./chart.js";
import { chartMenu } from "./chart_files.js";
import { h, number, plain, replace, s } from "./dom.js";
import { t } from "./language.js";

/** Bars of a value for each step, one part above the other, negative ones below zero. `parts`: [{name, values}], aligned
 * with `steps`. */
export function stackedBars(title, getData, settings, onStep, unit = " s") {
  const svg = s("svg", { class: "chart", role: "img", "aria-label": plain(title), height: HEIGHT });
  const legend = h("div", { class: "legend" });
  const getSeries = () => {
    const { steps, parts } = getData();
    return parts.map((part) => ({ ...part, steps }));
  };
  const frame = h(
    "figure",
    { class: "card wide" },
    h(
      "figcaption",
      {},
      h("span", { class: "title" }, title),
      h("span", { class: "grow" }),
      chartMenu(title, svg, getSeries),
    ),
    legend,
    h("div", { class: "canvas" }, svg),
  );

  function draw() {
    const { steps, parts } = getData();
    const inRange = steps
      .map((step, index) => [step, index])
      .filter(([step]) => !settings.range || (step >= settings.range[0] && step <= settings.range[1]));
    frame.hidden = !inRange.length || !parts.length;
    if (frame.hidden) return;
    const width = svg.parentElement?.clientWidth || 900;
    const perBar = Math.ceil(inRange.length / Math.max(20, Math.floor(width / 9)));
    const bars = Array.from({ length: Math.ceil(inRange.length / perBar) }, (_, index) =>
      inRange.slice(index * perBar, (index + 1) * perBar),
    );
    const mean = (part, bar) => bar.reduce((sum, [, index]) => sum + (part.values[index] ?? 0), 0) / bar.length;
    const sumOf = (bar, sign) => parts.reduce((sum, part) => sum + sign * Math.max(0, sign * mean(part, bar)), 0);
    const [lowest, highest] = [min(bars.map((bar) => sumOf(bar, -1))), max(bars.map((bar) => sumOf(bar, 1)))];
    const whole = highest - lowest || 1;
    const y = (value) => MARGIN.top + ((lowest + whole - value) / whole) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    const slot = (width - MARGIN.left - MARGIN.right) / bars.length;
    svg.setAttribute("width", width);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const marks = axisMarks(width, ticks(lowest, lowest + whole, 4), y, [], (value) => `${number(value, 3)}${unit}`);
    const every = Math.ceil(bars.length / (width / 60));
    const drawn = bars.map((bar, index) => {
      const sums = { above: 0, below: 0 };
      const x = MARGIN.left + index * slot + slot * 0.12;
      const name = bar.length > 1 ? `${bar[0][0]}–${bar.at(-1)[0]}` : String(bar[0][0]);
      const words = parts.map((part) => `${t(part.name)} ${number(mean(part, bar), 3)}${unit}`).join("\n");
      return s(
        "g",
        { class: "bar", onclick: () => onStep?.(bar[0][0]) },
        s("title", {}, `${t("step {}").replace("{}", name)}\n${words}`),
        parts.map((part, number_) => {
          const value = mean(part, bar);
          const side = value < 0 ? "below" : "above";
          const from = sums[side];
          sums[side] += value;
          const top = y(Math.max(from, sums[side]));
          return s("rect", {
            x,
            width: bars.length > 100 ? slot + 0.5 : slot * 0.76, // many bars are an area, not a comb
            y: top,
            height: Math.max(0, y(Math.min(from, sums[side])) - top),
            class: `fill-${number_ % COLORS}`,
          });
        }),
        index % every
          ? null
          : s("text", { x: x + slot * 0.38, y: HEIGHT - 6, "text-anchor": "middle", class: "mark" }, String(bar[0][0])),
      );
    });
    replace(svg, marks, drawn);
    replace(
      legend,
      parts.map((part, index) => h("span", { class: `key line-${index % COLORS}` }, t(part.name))),
    );
  }
  settings.add(draw);
  return { element: frame, draw };
}

const WIDTH = 460;
const BINS = 12;

/** The ends of the scale on which rewards are colored and drawn, the same wherever rewards of one size are. */
export function rewardRange(rewards) {
  const round = (size) => {
    const power = 10 ** Math.floor(Math.log10(size));
    return [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= size * (1 - 1e-9));
  };
  const [low, high] = [min([0, ...rewards]), max([1, ...rewards])];
  return [low < 0 ? -round(-low) : 0, high > 1 ? round(high) : 1];
}

function picture(title, about, ...content) {
  return h(
    "figure",
    { class: "card" },
    h("figcaption", {}, h("span", { class: "title" }, title)),
    h("div", { class: "legend" }, about),
    s("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": plain(title) }, content),
  );
}

/** How rewards are distributed over steps: the more of a step's samples, the darker. `steps`: as of samples.json. */
export function rewardMap(steps, onStep) {
  const [low, high] = rewardRange(steps.flatMap((one) => one.reward));
  const [inner, tall] = [WIDTH - MARGIN.left - MARGIN.right, HEIGHT - MARGIN.top - MARGIN.bottom];
  const slot = inner / steps.length;
  const y = (reward) => MARGIN.top + (1 - (reward - low) / (high - low)) * tall;
  const columns = steps.map((one, index) => {
    const bins = new Array(BINS).fill(0);
    for (const reward of one.reward) bins[Math.min(BINS - 1, Math.floor(((reward - low) / (high - low)) * BINS))] += 1;
    return s(
      "g",
      { class: "bar", onclick: () => onStep(one.step) },
      s("title", {}, t("step {}").replace("{}", one.step)),
      bins.map((count, bin) =>
        count
          ? s("rect", {
              x: MARGIN.left + index * slot,
              width: slot + 0.3,
              y: MARGIN.top + (1 - (bin + 1) / BINS) * tall,
              height: tall / BINS + 0.3,
              class: "fill-0",
              opacity: (0.1 + 0.9 * (count / one.reward.length)).toFixed(2),
            })
          : null,
      ),
    );
  });
  const every = Math.ceil(steps.length / (WIDTH / 60));
  const down = steps.map((one, index) => [MARGIN.left + (index + 0.5) * slot, one.step]).filter((_, index) => index % every === 0);
  return picture(t("Distribution of rewards over steps"), "", axisMarks(WIDTH, ticks(low, high, 4), y, down), columns);
}

/** Reward against length of the samples of the first and the last steps. Each dot opens its sample. */
export function rewardsByLength(steps, onSample) {
  const few = Math.min(5, Math.ceil(steps.length / 2));
  const parts = [steps.slice(0, few), steps.slice(-few)].slice(steps.length > 1 ? 0 : 1);
  const all = parts.map((part, color) =>
    part.flatMap((one) =>
      one.reward.map((reward, at) => ({ reward, length: one.num_generated[at], step: one.step, index: one.index[at], color })),
    ),
  );
  const dots = all.flat();
  const [low, high] = rewardRange(dots.map((one) => one.reward));
  const longest = max(dots.map((one) => one.length)) || 1;
  const x = (length) => MARGIN.left + (length / longest) * (WIDTH - MARGIN.left - MARGIN.right);
  const y = (reward) => MARGIN.top + (1 - (reward - low) / (high - low)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const legend = all.map((own, color) => {
    const [first, last] = [parts[color][0].step, parts[color].at(-1).step];
    const name = first === last ? t("step {}").replace("{}", first) : t("steps {}").replace("{}", `${first}–${last}`);
    return h("span", { class: `key line-${color}` }, `${name}: ${t("correlation")} ${number(correlation(own), 2)}`);
  });
  const down = ticks(0, longest, 5).map((length) => [x(length), length]);
  return picture(
    t("Reward against length"),
    legend,
    axisMarks(WIDTH, ticks(low, high, 4), y, down),
    dots.map((one) =>
      s(
        "circle",
        { cx: x(one.length), cy: y(one.reward), r: 3, class: `dot bar line-${one.color}`, opacity: 0.55, onclick: () => onSample(one) },
        s("title", {}, `${t("step {}").replace("{}", one.step)}, ${t("reward")} ${number(one.reward, 4)}, ${one.length} ${t("tokens")}`),
      ),
    ),
  );
}

/** Pearson's, of rewards and lengths; null where one of them does not vary. */
function correlation(samples) {
  const mean = (of) => samples.reduce((sum, one) => sum + of(one), 0) / samples.length;
  const [reward, length] = [mean((one) => one.reward), mean((one) => one.length)];
  const both = mean((one) => (one.reward - reward) * (one.length - length));
  const spread = Math.sqrt(mean((one) => (one.reward - reward) ** 2) * mean((one) => (one.length - length) ** 2));
  return spread > 1e-12 ? both / spread : null;
}

/** How far ratios are from 1 in each tenth of the replies, in the mean of the samples. */
export function ratioByTenth(samples) {
  const known = samples.map((one) => one.ratio_by_tenth).filter(Boolean);
  if (!known.length) return null;
  const means = known[0].map((_, tenth) => known.reduce((sum, own) => sum + (own[tenth] ?? 0), 0) / known.length);
  const highest = max(means) || 1;
  const tall = HEIGHT - MARGIN.top - MARGIN.bottom;
  const slot = (WIDTH - MARGIN.left - MARGIN.right) / means.length;
  const y = (value) => MARGIN.top + (1 - value / highest) * tall;
  const down = means.map((_, tenth) => [MARGIN.left + (tenth + 0.5) * slot, `${10 * (tenth + 1)} %`]);
  return picture(
    t("Distance of ratios from 1, by position in the reply"),
    "",
    axisMarks(WIDTH, ticks(0, highest, 4), y, down),
    means.map((value, tenth) =>
      s(
        "rect",
        { x: MARGIN.left + (tenth + 0.12) * slot, width: slot * 0.76, y: y(value), height: y(0) - y(value), class: "fill-0" },
        s("title", {}, `${10 * tenth}–${10 * (tenth + 1)} %: ${number(value, 3)}`),
      ),
    ),
  );
}

export function histogram(values, width = 320, height = 90) {
  const [low, high] = [min(values), max(values)];
  const count = Math.min(24, Math.max(1, new Set(values).size));
  const bins = new Array(count).fill(0);
  for (const value of values)
    bins[high === low ? 0 : Math.min(count - 1, Math.floor(((value - low) / (high - low)) * count))] += 1;
  const most = max(bins) || 1;
  const slot = width / count;
  const bars = bins.map((bin, index) =>
    s(
      "rect",
      {
        x: index * slot + 1,
        width: Math.max(1, slot - 2),
        y: (height - 16) * (1 - bin / most),
        height: (height - 16) * (bin / most),
        class: "fill-0",
      },
      s("title", {}, String(bin)),
    ),
  );
  const marks = [
    s("text", { x: 0, y: height - 2, class: "mark" }, number(low, 3)),
    s("text", { x: width, y: height - 2, "text-anchor": "end", class: "mark" }, number(high, 3)),
  ];
  return s(
    "svg",
    { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": t("Distribution") },
    bars,
    low === high ? marks[0] : marks,
  );
}

export function sparkline(values, width = 120, height = 28) {
  const [low, high] = [min(values), max(values)];
  const at = (value, index) =>
    `${((index / (values.length - 1)) * (width - 4) + 2).toFixed(1)} ${(height - 3 - ((value - low) / (high - low || 1)) * (height - 6)).toFixed(1)}`;
  return s(
    "svg",
    { class: "sparkline", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    s("path", { d: `M${values.map(at).join("L")}`, class: "line line-0" }),
  );
}
