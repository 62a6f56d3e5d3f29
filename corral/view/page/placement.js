// Which roles have which devices, drawn: a row of boxes for each node, in them a stripe for each role.

import { COLORS } from "./chart.js";
import { h, number, plain, s } from "./dom.js";
import { t } from "./language.js";

const MOST_DEVICES = 1024;
const [WIDTH, GAP, HEAD, STRIPE, EDGE] = [92, 6, 18, 16, 36];

/** `placement`: {nodes, devices_per_node, roles: {name: [device]}, memory: [[[device], bytes]]}; devices count on from
 * node to node. */
export function placementPicture(placement) {
  if (!placement) return null;
  const { nodes, devices_per_node: perNode, roles, memory } = placement;
  const names = Object.keys(roles);
  const rolesOf = new Map();
  names.forEach((name, color) => {
    for (const device of roles[name]) rolesOf.set(device, [...(rolesOf.get(device) ?? []), [name, color % COLORS]]);
  });
  const needed = new Map(memory.flatMap(([devices, bytes]) => devices.map((device) => [device, bytes])));
  const inRow = Math.max(1, Math.min(perNode, Math.floor((Math.min(innerWidth, 1400) - 90) / (WIDTH + GAP))));
  const height = HEAD + 6 + STRIPE * Math.max(1, ...[...rolesOf.values()].map((own) => own.length));
  const nodeHeight = EDGE + Math.ceil(perNode / inRow) * (height + GAP);

  function box(device, x, y) {
    const own = rolesOf.get(device) ?? [];
    const words = [`${t("device")} ${device}: ${own.map(([name]) => name).join(", ") || t("idle")}`];
    if (needed.has(device)) words.push(`${number(needed.get(device) / 2 ** 30, 3)} GiB`);
    return s(
      "g",
      { class: "place", transform: `translate(${x} ${y})` },
      s("title", {}, plain(words.join("\n"))),
      s("rect", { class: "place-box", width: WIDTH, height, rx: 5 }),
      s("text", { class: "mark", x: 7, y: 13 }, String(device)),
      own.length ? null : s("text", { class: "mark", x: 7, y: HEAD + 11 }, t("idle")),
      own.map(([name, color], index) => [
        s("rect", { class: `fill-${color}`, x: 4, y: HEAD + index * STRIPE, width: WIDTH - 8, height: STRIPE - 2, rx: 3 }),
        s("text", { class: "on-fill", x: 9, y: HEAD + 11 + index * STRIPE }, plain(name).slice(0, 13)),
      ]),
    );
  }

  const shownNodes = Math.min(nodes, Math.ceil(MOST_DEVICES / perNode));
  const drawn = Array.from({ length: shownNodes }, (_, node) =>
    s(
      "g",
      { transform: `translate(0 ${node * nodeHeight})` },
      s("text", { class: "node", x: 2, y: 16 }, `${t("node")} ${node}`),
      Array.from({ length: perNode }, (_, at) =>
        box(node * perNode + at, (at % inRow) * (WIDTH + GAP) + 1, 24 + Math.floor(at / inRow) * (height + GAP)),
      ),
    ),
  );
  const size = { width: inRow * (WIDTH + GAP) + 2, height: shownNodes * nodeHeight };
  return h(
    "figure",
    { class: "card placement" },
    h("figcaption", {}, h("span", { class: "title" }, t("Placement"))),
    s("svg", { ...size, viewBox: `0 0 ${size.width} ${size.height}`, role: "img", "aria-label": t("Placement") }, drawn),
    nodes > shownNodes ? h("p", { class: "quiet small" }, `… ${nodes - shownNodes} ${t("more nodes")}`) : null,
  );
}
