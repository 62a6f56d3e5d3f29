// A chart as a file: PNG, SVG and CSV.

import { download, h, plain } from "./dom.js";
import { t } from "./language.js";

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family"];

export function chartMenu(title, svg, getSeries) {
  const name = plain(title).replace(/[^\w@.-]+/g, "_");
  const button = (label, act) =>
    h("button", { type: "button", class: "plain small", title: `${t("Save as")} ${label}`, onclick: act }, label);
  return h(
    "span",
    { class: "menu" },
    button("PNG", () => savePng(svg, name)),
    button("SVG", () => download(`${name}.svg`, "image/svg+xml", svgText(svg))),
    button("CSV", () => download(`${name}.csv`, "text/csv", csvText(getSeries()))),
  );
}

export function csvText(series) {
  const curves = series.filter((one) => !one.level);
  const steps = [...new Set(curves.flatMap((one) => one.steps))].sort((one, other) => one - other);
  const quoted = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const places = curves.map((one) => new Map(one.steps.map((step, index) => [step, one.values[index]])));
  const rows = steps.map((step) => [step, ...places.map((place) => place.get(step) ?? "")]);
  return [["step", ...curves.map((one) => quoted(one.name))], ...rows].map((row) => row.join(",")).join("\n") + "\n";
}

/** The picture on its own: the colors of the style sheet become attributes. */
export function svgText(svg) {
  const copy = svg.cloneNode(true);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  const originals = [svg, ...svg.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((element, index) => {
    const computed = getComputedStyle(originals[index]);
    for (const style of STYLES) element.setAttribute(style, computed.getPropertyValue(style));
    element.removeAttribute("class");
  });
  return new XMLSerializer().serializeToString(copy);
}

async function savePng(svg, name) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(svg))}`;
  await image.decode();
  const canvas = h("canvas", { width: 2 * svg.clientWidth, height: 2 * svg.clientHeight });
  const context = canvas.getContext("2d");
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => download(`${name}.png`, "image/png", blob));
}
