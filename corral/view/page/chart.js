// Line charts as SVG, with zoom, log axis and smoothing.

import { chartMenu } from "./chart_files.js";
import { h, number, plain, replace, s } from "./dom.js";
import { t } from "./language.js";

export const HEIGHT = 210;
export const MARGIN = { left: 52, right: 12, top: 8, bottom: 24 };
export const COLORS = 8; // classes line-0 ... line-7 of the style sheet

/** What the charts of a page have in common: `range` of steps, smoothing and log axis. Charts are drawn again on change. */
export function chartSettings() {
  const drawings = new Set();
  const settings = {
    range: null,
    window: 0,
    log: false,
    draw: () => drawings.forEach((draw) => draw()),
    add: (draw) => drawings.add(draw),
    set: (changes) => {
      Object.assign(settings, changes);
      settings.draw();
    },
  };
  addEventListener("resize", settings.draw);
  settings.leave = () => removeEventListener("resize", settings.draw);
  return settings;
}

/** Mean over a window around each value, as in curve.png: it does not lag behind. `reach`: values on either side. */
export function smooth(values, reach) {
  if (!reach) return values;
  return values.map((value, index) => {
    if (value === null) return null;
    const around = values.slice(Math.max(0, index - reach), index + reach + 1).filter((one) => one !== null);
    return around.reduce((sum, one) => sum + one, 0) / around.length;
  });
}

/** `series`: functions or lists of {name, steps, values, ci?, level?}; a `level` is a horizontal line. */
export function lineChart(title, getSeries, settings, onStep) {
  const svg = s("svg", { class: "chart", role: "img", tabindex: 0, "aria-label": plain(title), height: HEIGHT });
  const tip = h("div", { class: "tip", hidden: true });
  const legend = h("div", { class: "legend" });
  const log = h(
    "button",
    {
      type: "button",
      class: "plain small",
      "aria-pressed": "false",
      onclick: () => {
        own.log = !own.log;
        draw();
      },
    },
    "log",
  );
  const own = { log: false };
  const frame = h(
    "figure",
    { class: "card" },
    h(
      "figcaption",
      {},
      h("span", { class: "title" }, title),
      h("span", { class: "grow" }),
      chartMenu(title, svg, getSeries),
      log,
    ),
    legend,
    h("div", { class: "canvas" }, svg, tip),
  );
  let scale = null;
  let pointed = null;

  function draw() {
    const series = getSeries().filter((one) => one.values.some((value) => value !== null));
    frame.hidden = !series.length;
    if (!series.length) return;
    const isLog = own.log || settings.log;
    log.setAttribute("aria-pressed", String(isLog));
    scale = scaleOf(series, svg.parentElement?.clientWidth || 420, settings.range, isLog);
    svg.setAttribute("width", scale.width);
    svg.setAttribute("viewBox", `0 0 ${scale.width} ${HEIGHT}`);
    replace(
      svg,
      axes(scale),
      series.map((one, index) => drawSeries(one, one.color ?? index % COLORS, scale, settings.window)),
      s("g", { class: "cross" }),
    );
    replace(
      legend,
      series.map((one, index) => h("span", { class: `key line-${one.color ?? index % COLORS}` }, plain(one.name))),
    );
  }

  function point(step) {
    const series = getSeries();
    const steps = [...new Set(series.flatMap((one) => one.steps ?? []))].sort((one, other) => one - other);
    if (!steps.length || !scale) return;
    pointed = steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
    const x = scale.x(pointed);
    replace(
      svg.querySelector(".cross"),
      s("line", { x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, class: "crossline" }),
    );
    const lines = series
      .filter((one) => !one.level)
      .map((one) => [one.name, one.values[one.steps.indexOf(pointed)]])
      .filter(([, value]) => value !== null && value !== undefined);
    replace(
      tip,
      h("strong", {}, t("step {}").replace("{}", pointed)),
      lines.map(([name, value]) => h("div", {}, `${plain(name)} `, h("b", {}, number(value, 6)))),
    );
    tip.hidden = false;
    tip.style.left = `${Math.min(x + 10, scale.width - 150)}px`;
  }

  let dragFrom = null;
  const xOf = (event) => event.clientX - svg.getBoundingClientRect().left;
  svg.addEventListener("pointerdown", (event) => {
    dragFrom = xOf(event);
  });
  svg.addEventListener("pointermove", (event) => {
    if (!scale) return;
    point(scale.stepAt(xOf(event)));
    if (dragFrom !== null && Math.abs(xOf(event) - dragFrom) > 4) {
      const [from, to] = [dragFrom, xOf(event)].sort((one, other) => one - other);
      svg.querySelector(".cross").append(
        s("rect", {
          x: from,
          width: to - from,
          y: MARGIN.top,
          height: HEIGHT - MARGIN.top - MARGIN.bottom,
          class: "selection",
        }),
      );
    }
  });
  svg.addEventListener("pointerup", (event) => {
    const from = dragFrom;
    dragFrom = null;
    if (from === null || !scale) return;
    if (Math.abs(xOf(event) - from) > 4) {
      const range = [scale.stepAt(from), scale.stepAt(xOf(event))].sort((one, other) => one - other);
      if (range[1] - range[0] > 0.5) settings.set({ range });
    } else if (pointed !== null) onStep?.(pointed);
  });
  svg.addEventListener("dblclick", () => settings.set({ range: null }));
  svg.addEventListener("pointerleave", () => {
    dragFrom = null;
    tip.hidden = true;
    replace(svg.querySelector(".cross") ?? svg);
  });
  svg.addEventListener("keydown", (event) => {
    const [low, high] = scale?.domain ?? [0, 1];
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const all = [...new Set(getSeries().flatMap((one) => one.steps ?? []))].sort((one, other) => one - other);
      const at = all.indexOf(pointed);
      point(all[Math.max(0, Math.min(all.length - 1, at + (event.key === "ArrowLeft" ? -1 : 1)))]);
    } else if (event.key === "+") settings.set({ range: [low + (high - low) / 4, high - (high - low) / 4] });
    else if (event.key === "-" || event.key === "0") settings.set({ range: null });
    else if (event.key === "Enter" && pointed !== null) onStep?.(pointed);
    else return;
    event.preventDefault();
  });
  settings.add(draw);
  return { element: frame, draw };
}

function scaleOf(series, width, range, isLog) {
  const curves = series.filter((one) => !one.level);
  const steps = curves.flatMap((one) => one.steps.filter((_, index) => one.values[index] !== null));
  const [low, high] = range ?? [min(steps), max(steps)];
  const seen = curves.flatMap((one) =>
    one.values.flatMap((value, index) => {
      if (value === null || one.steps[index] < low || one.steps[index] > high) return [];
      const ci = one.ci?.[index] ?? 0;
      return [value - ci, value + ci];
    }),
  );
  const values = [...seen, ...series.filter((one) => one.level).map((one) => one.values[0])].filter(
    (value) => !isLog || value > 0,
  );
  let [bottom, top] = values.length ? [min(values), max(values)] : [isLog ? 0.1 : 0, 1];
  if (isLog) [bottom, top] = [Math.log10(bottom), Math.log10(top)];
  if (top - bottom < 1e-12 * Math.max(1, Math.abs(top)))
    [bottom, top] = [
      bottom - (isLog ? 0.5 : Math.abs(bottom) / 10 || 0.5),
      top + (isLog ? 0.5 : Math.abs(top) / 10 || 0.5),
    ];
  const space = isLog ? 0 : (top - bottom) * 0.04;
  // No axis goes below 0 where nothing can.
  const lowest = !isLog && values.every((value) => value >= 0) ? 0 : -Infinity;
  [bottom, top] = [Math.max(lowest, bottom - space), top + space];
  const inner = width - MARGIN.left - MARGIN.right;
  const span = high - low || 1;
  const y = (value) => {
    const at = isLog ? Math.log10(value) : value;
    return MARGIN.top + (1 - (at - bottom) / (top - bottom)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  };
  return {
    width,
    isLog,
    isFraction: curves.every((one) => one.isFraction),
    domain: [low, high],
    bottom,
    top,
    x: (step) => MARGIN.left + (high === low ? inner / 2 : ((step - low) / span) * inner),
    stepAt: (x) => low + ((x - MARGIN.left) / inner) * span,
    y: (value) => (isLog && value <= 0 ? null : y(value)),
    isIn: (step) => step >= low && step <= high,
  };
}

export function min(values) {
  return values.reduce((least, value) => Math.min(least, value), Infinity);
}
export function max(values) {
  return values.reduce((most, value) => Math.max(most, value), -Infinity);
}

export function ticks(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const every = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const first = Math.ceil(low / every - 1e-9);
  return Array.from({ length: Math.floor(high / every + 1e-9) - first + 1 }, (_, index) => (first + index) * every);
}

/** Lines and numbers of two axes. `across`: values on the left one. `down`: places on the lower one, with their texts. */
export function axisMarks(width, across, y, down, textOf = (value) => number(Number(value.toPrecision(6)), 4)) {
  return [
    across.map((value) => [
      s("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value), class: "grid" }),
      s("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end", class: "mark" }, textOf(value)),
    ]),
    down.map(([x, text]) => s("text", { x, y: HEIGHT - 6, "text-anchor": "middle", class: "mark" }, String(text))),
  ];
}

function axes(scale) {
  const { bottom, top, domain } = scale;
  let marks = ticks(bottom, top, 4);
  if (scale.isLog) {
    marks = marks.filter(Number.isInteger).map((power) => 10 ** power);
    if (marks.length < 2) marks = ticks(10 ** bottom, 10 ** top, 4).filter((value) => value > 0);
  }
  const down = ticks(domain[0], domain[1], Math.min(6, scale.width / 80)).filter(Number.isInteger);
  return axisMarks(
    scale.width,
    marks,
    scale.y,
    down.map((step) => [scale.x(step), step]),
    scale.isFraction ? (value) => `${number(100 * value, 3)} %` : undefined,
  );
}

/** The points that can be told apart: of those above each other in a column of pixels the first, highest, lowest, last. */
function thinned(points) {
  const columns = new Map();
  for (const point of points) {
    const x = Math.floor(point[0]);
    const [first, high, low] = columns.get(x) ?? [point, point, point];
    columns.set(x, [first, point[1] < high[1] ? point : high, point[1] > low[1] ? point : low, point]);
  }
  return points.length <= 4 * columns.size ? points : [...columns.values()].flat();
}

function drawSeries(one, color, scale, reach) {
  if (one.level) {
    const y = scale.y(one.values[0]);
    return y === null
      ? null
      : s("line", {
          x1: MARGIN.left,
          x2: scale.width - MARGIN.right,
          y1: y,
          y2: y,
          class: `line dashed line-${color}`,
        });
  }
  const points = one.steps
    .map((step, index) => [step, one.values[index], one.ci?.[index] ?? null])
    .filter(([step, value]) => value !== null && scale.isIn(step));
  const smoothed = smooth(
    points.map(([, value]) => value),
    reach,
  );
  const path = (values) =>
    thinned(values.map((value, index) => [scale.x(points[index][0]), scale.y(value)]).filter(([, y]) => y !== null))
      .map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`)
      .join("");
  const raw = path(points.map(([, value]) => value));
  const parts = [];
  if (one.ci && !scale.isLog) {
    parts.push(
      points
        .filter(([, , ci]) => ci !== null)
        .map(([step, value, ci]) =>
          s("line", {
            x1: scale.x(step),
            x2: scale.x(step),
            y1: scale.y(value - ci),
            y2: scale.y(value + ci),
            class: `interval line-${color}`,
          }),
        ),
    );
  }
  parts.push(s("path", { d: raw, class: `line line-${color}${reach ? " faint" : ""}` }));
  if (reach) parts.push(s("path", { d: path(smoothed), class: `line line-${color}` }));
  if (points.length <= 40 && !reach) {
    parts.push(
      points
        .map(([step, value]) => [scale.x(step), scale.y(value)])
        .filter(([, y]) => y !== null)
        .map(([x, y]) => s("circle", { cx: x, cy: y, r: 2.2, class: `dot line-${color}` })),
    );
  }
  return parts;
}
