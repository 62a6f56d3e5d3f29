// Stacked bars, histograms and sparklines as SVG.

import { COLORS, HEIGHT, MARGIN, max, min, ticks } from "./chart.js";
import { chartMenu } from "./chart_files.js";
import { h, number, plain, replace, s } from "./dom.js";
import { t } from "./language.js";

/** Bars of a value for each step, one part above the other. `parts`: [{name, values}], aligned with `steps`. */
export function stackedBars(title, getData, settings, onStep) {
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
    const highest = max(bars.map((bar) => parts.reduce((sum, part) => sum + mean(part, bar), 0))) || 1;
    const y = (value) => MARGIN.top + (1 - value / highest) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    const slot = (width - MARGIN.left - MARGIN.right) / bars.length;
    svg.setAttribute("width", width);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const marks = ticks(0, highest, 4).map((value) => [
      s("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value), class: "grid" }),
      s("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end", class: "mark" }, `${number(value, 3)} s`),
    ]);
    const every = Math.ceil(bars.length / (width / 60));
    const drawn = bars.map((bar, index) => {
      let sum = 0;
      const x = MARGIN.left + index * slot + slot * 0.12;
      const name = bar.length > 1 ? `${bar[0][0]}–${bar.at(-1)[0]}` : String(bar[0][0]);
      const words = parts.map((part) => `${part.name} ${number(mean(part, bar), 3)} s`).join("\n");
      return s(
        "g",
        { class: "bar", onclick: () => onStep?.(bar[0][0]) },
        s("title", {}, `${t("step")} ${name}\n${words}`),
        parts.map((part, number_) => {
          const value = mean(part, bar);
          sum += value;
          return s("rect", {
            x,
            width: Math.max(1, slot * 0.76),
            y: y(sum),
            height: Math.max(0, y(sum - value) - y(sum)),
            class: `fill-${number_ % COLORS}`,
          });
        }),
        index % every
          ? null
          : s("text", { x: x + slot * 0.38, y: HEIGHT - 6, "text-anchor": "middle", class: "mark" }, name),
      );
    });
    replace(svg, marks, drawn);
    replace(
      legend,
      parts.map((part, index) => h("span", { class: `key line-${index % COLORS}` }, plain(part.name))),
    );
  }
  settings.add(draw);
  return { element: frame, draw };
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
