// Elements out of data. Text from runs becomes text nodes and nothing else: no function here takes HTML.

import { t } from "./language.js";

const SVG = "http://www.w3.org/2000/svg";
// Characters that would move, hide or reverse what stands beside them: controls, bidirectional marks, lone surrogates.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const LONGEST = 20000;

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Text of a run as nodes: what is hidden is shown as its code, and a very long text is cut until it is asked for. */
export function shown(text, longest = LONGEST) {
  const value = String(text ?? "");
  if (value.length > longest) {
    const more = h("button", { class: "link", type: "button" }, t("… {} more characters").replace("{}", value.length - longest));
    more.addEventListener("click", () => more.replaceWith(...shown(value.slice(longest), 20 * longest)));
    return [...shown(value.slice(0, longest), longest), more];
  }
  const nodes = [];
  let end = 0;
  for (const match of value.matchAll(HIDDEN)) {
    if (match.index > end) nodes.push(value.slice(end, match.index));
    nodes.push(h("span", { class: "code", title: codeOf(match[0]) }, codeOf(match[0])));
    end = match.index + match[0].length;
  }
  if (end < value.length) nodes.push(value.slice(end));
  return nodes;
}

function codeOf(character) {
  return `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`;
}

/** The same for titles and other attributes, which hold text only. */
export function plain(text) {
  return String(text ?? "").replace(HIDDEN, codeOf);
}

/** A line of a run's log without its time, level and logger. */
export function messageOf(line) {
  return line.replace(/^\S+ [A-Z]+ [\w.]+: /, "");
}

export function link(href, ...children) {
  return h("a", { href }, ...children);
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return Math.abs(value) < 1e7 ? String(value) : value.toExponential(2);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${number(seconds, 3)} ${t("s")}`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} ${t("min")}`;
  return seconds < 86400 ? `${number(seconds / 3600, 2)} ${t("h")}` : `${number(seconds / 86400, 2)} ${t("d")}`;
}

export function download(name, type, content) {
  const address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

export function table(head, rows, attributes = {}) {
  const cells = (tag, row) => row.map((cell) => (cell?.tagName === "TD" ? cell : h(tag, {}, cell ?? "")));
  const body = rows.map((row) => (Array.isArray(row) ? h("tr", {}, cells("td", row)) : row));
  const headRow = head.length ? h("thead", {}, h("tr", {}, cells("th", head))) : null;
  return h("div", { class: "scroll" }, h("table", attributes, headRow, h("tbody", {}, body)));
}
