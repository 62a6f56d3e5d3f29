// A trajectory: the conversation token by token, the group's samples as a tree, two samples side by side.

import { getKept } from "./data.js";
import { h, link, number, replace, shown } from "./dom.js";
import { t } from "./language.js";
import { askedOf, rewardsOf, sampleCells } from "./page_step.js";
import {
  colorsFor,
  columnNames,
  describeToken,
  firstDifference,
  legendOf,
  nameOf,
  segmentsOf,
  tokenSpan,
  tokenSpans,
  tokensOf,
  treeOf,
} from "./tokens.js";

const VIEWS = { conversation: "conversation", tree: "tree", beside: "side by side" };
const COLUMN = "corral-column";
const SHORT_START = 40;
const SHORT_END = 20;
// Where a message begins in the chat templates of ChatML, Llama, Gemma, Phi, gpt-oss, Mistral and DeepSeek, and what ends one.
const OPENS =
  /<\|(?:im_)?start\|>(\w+)(?:\n|(?:<\|channel\|>\w+)?<\|message\|>)|<\|start_header_id\|>(\w+)<\|end_header_id\|>|<start_of_turn>(\w+)\n|<\|(system|user|assistant|tool|observation)\|>|(\[\/?INST\])|<[|｜](User|Assistant)[|｜]>/g;
const ENDS =
  /<\|(?:im_end|end|eot_id|eom_id|end_of_text|endoftext|begin_of_text|return|call)\|>|<end_of_turn>|<\/?s>|<[be]os>|<[|｜](?:begin|end)▁of▁sentence[|｜]>/g;
const ROLES = { "[INST]": "user", "[/INST]": "assistant", model: "assistant", User: "user", Assistant: "assistant" };

export async function trajectoryPage(id, name, index, view = "conversation", other) {
  // The last part of the address: in the conversation a token, side by side the other sample.
  const load = (at) => getKept("run", id, "step", name, `${at}.json`);
  const [record, { trajectories }] = await Promise.all([load(index), getKept("run", id, "step", `${name}.json`)]);
  const group = trajectories.filter((one) => one.prompt_id !== undefined && one.prompt_id === record.prompt_id);
  const address = `#/run/${encodeURIComponent(id)}`;
  const here = `${address}/step/${name}`;
  const own = tokensOf(record);
  const wanted =
    view === "conversation"
      ? []
      : view === "tree"
        ? group
        : group.filter((one) => one.index === Number(other ?? nextOf(group, index)));
  const others = await Promise.all(
    wanted
      .filter((one) => one.index !== Number(index))
      .map(async (one) => ({ sample: one, tokens: tokensOf(await load(one.index)) })),
  );
  const all = [{ sample: { ...record, index: Number(index) }, tokens: own }, ...others];
  const columns = columnNames(own);
  const kept = localStorage.getItem(COLUMN);
  const select = h(
    "select",
    {
      "aria-label": t("Color by"),
      onchange: () => {
        localStorage.setItem(COLUMN, select.value);
        draw();
      },
    },
    columns.map((column) => h("option", { value: column, selected: column === kept }, nameOf(column))),
  );
  const legend = h("span");
  const values = h(
    "div",
    { class: "values", "aria-live": "polite" },
    h("span", { class: "quiet" }, t("Point at a token, or move with the arrow keys.")),
  );
  const body = h("div", { class: "tokens" });

  function draw() {
    const { color, legend: scale } = colorsFor(
      select.value,
      all.flatMap((one) => one.tokens),
    );
    replace(legend, legendOf(scale));
    replace(
      body,
      {
        conversation: () => h("div", { class: "beside" }, rendered(record), h("div", {}, conversation(record, own, color))),
        tree: () => tree(all, color, here, rewards),
        beside: () => beside(all, color, group, here, index),
      }[view](),
    );
  }

  const rewards = rewardsOf(trajectories);
  const drawn = framesOf(record);
  let current = -1;
  function point(span) {
    body.querySelector(".token.pointed")?.classList.remove("pointed");
    span.classList.add("pointed");
    current = [...body.querySelectorAll(".token")].indexOf(span);
    const sequence =
      all.find((one) => String(one.sample.index) === span.closest("[data-sample]")?.dataset.sample) ?? all[0];
    replace(values, describeToken(sequence.tokens[Number(span.dataset.token)]));
  }
  body.addEventListener("pointerover", (event) => {
    const span = event.target.closest(".token");
    if (span) point(span);
  });
  const move = (by) => {
    const spans = body.querySelectorAll(".token");
    const span = spans[Math.max(0, Math.min(spans.length - 1, current + by))];
    if (!span) return;
    point(span);
    span.scrollIntoView({ block: "nearest" });
  };
  const go = (by) => {
    const at = trajectories.findIndex((one) => one.index === Number(index)) + by;
    if (trajectories[at])
      location.hash = `${here}/${trajectories[at].index}${view === "conversation" ? "" : `/${view}`}`;
  };
  draw();
  const [step, part] = name.split(".");
  const pointed = view === "conversation" && other ? body.querySelector(`[data-token="${other}"]`) : null;
  return {
    title: `${id} · ${name} · ${index}`,
    trail: [
      [id, address],
      [`${t("step {}").replace("{}", step)}${part ? ` · ${t(part)}` : ""}`, here],
      [`${t("prompt")} ${record.prompt_id ?? "?"}, ${t("sample")} ${record.sample ?? index}`],
    ],
    content: [
      facts(record, own, address, part),
      group.length > 1
        ? sampleCells(
            group,
            (one) => `${here}/${one.index}${view === "conversation" ? "" : `/${view}`}`,
            rewards,
            Number(index),
          )
        : null,
      h(
        "div",
        { class: "tabs" },
        Object.entries(VIEWS).map(([one, label]) =>
          h("a", { href: `${here}/${index}/${one}`, "aria-current": one === view ? "page" : null }, t(label)),
        ),
      ),
      h(
        "div",
        { class: "toolbar sticky" },
        columns.length ? h("label", {}, t("Color by"), " ", select) : null,
        legend,
        values,
      ),
      record.prompt_pieces || !own.length
        ? null
        : h(
            "p",
            { class: "quiet small" },
            t("The text of single tokens needs the tokenizer of a checkpoint, which this run does not have yet."),
          ),
      view === "conversation" ? drawn.element : null,
      body,
    ],
    shown: () => {
      if (!pointed) return;
      point(pointed);
      pointed.scrollIntoView({ block: "center" });
    },
    keys: {
      ...(drawn.element
        ? { ".": ["next state", () => drawn.move(1)], ",": ["state before", () => drawn.move(-1)] }
        : {}),
      j: ["next sample", () => go(1)],
      k: ["sample before", () => go(-1)],
      ArrowRight: ["next token", () => move(1)],
      ArrowLeft: ["token before", () => move(-1)],
      c: [
        "color by the next value",
        () => {
          select.selectedIndex = (select.selectedIndex + 1) % Math.max(1, select.options.length);
          select.dispatchEvent(new Event("change"));
        },
      ],
      ...Object.fromEntries(
        Object.entries(VIEWS).map(([one, label], at) => [
          String(at + 1),
          [
            label,
            () => {
              location.hash = `${here}/${index}/${one}`;
            },
          ],
        ]),
      ),
    },
  };
}

function nextOf(group, index) {
  const at = group.findIndex((one) => one.index === Number(index));
  return group[(at + 1) % Math.max(1, group.length)]?.index ?? index;
}

function facts(record, tokens, address, part) {
  const numGenerated = tokens.filter((token) => token.isGenerated).length;
  const named = [...Object.entries(record.rewards ?? {}), ...Object.entries(record.metrics ?? {})].map(
    ([name, value]) => [shown(name), number(value, 4)],
  );
  const prompt =
    part || record.prompt_id === undefined
      ? String(record.prompt_id ?? "–")
      : link(`${address}/ledger/${record.prompt_id}`, String(record.prompt_id));
  const isPair = typeof record.is_chosen === "boolean";
  const entries = [
    isPair ? [t("answer"), t(record.is_chosen ? "chosen" : "rejected")] : null,
    [t(isPair ? "implicit reward" : "reward"), number(record.reward, 5)],
    ...named,
    [t("prompt"), prompt],
    [t("row"), String(record.row ?? "–")],
    [t("sample"), String(record.sample ?? "–")],
    [t("stop"), shown(record.stop)],
    [t("generated tokens"), String(numGenerated)],
    ...(record.tag ? [[t("environment"), shown(record.tag)]] : []),
  ];
  return [
    h(
      "div",
      { class: "facts" },
      entries.filter(Boolean).map(([name, value]) => h("div", {}, h("div", { class: "quiet small" }, name), h("strong", {}, value))),
    ),
    record.question || typeof record.answer === "string" ? h("div", { class: "card" }, askedOf(record, 1000)) : null,
    record.left_out ? h("p", { class: "warning" }, shown(record.left_out)) : null,
    [record.error, ...(record.tool_errors ?? [])]
      .filter(Boolean)
      .map((error) => h("pre", { class: "problem card" }, shown(error))),
  ];
}

/** What the environment drew of its states, one at a time: text, or pictures. */
function framesOf(record) {
  const frames = record.pictures ?? record.frames ?? [];
  if (!frames.some(Boolean)) return { element: null };
  const canvas = h("div", { class: "frame" });
  const label = h("span", { class: "quiet" });
  const range = h("input", { type: "range", min: 0, max: frames.length - 1, "aria-label": t("state"), oninput: draw });
  range.value = 0;

  function draw() {
    const at = Number(range.value);
    const isPicture = record.pictures !== undefined && frames[at].startsWith("data:image/png;base64,");
    replace(canvas, isPicture ? h("img", { src: frames[at], alt: "" }) : h("pre", {}, shown(frames[at])));
    replace(label, at ? t("after turn {}").replace("{}", `${at} / ${frames.length - 1}`) : t("before the first turn"));
  }
  draw();
  const move = (by) => {
    range.value = Number(range.value) + by;
    draw();
  };
  const button = (text, by, title) => h("button", { type: "button", title, onclick: () => move(by) }, text);
  const controls = [button("◀", -1, t("state before")), range, button("▶", 1, t("next state")), label];
  return { element: h("div", { class: "card frames" }, h("div", { class: "toolbar" }, controls), canvas), move };
}

/** What was said, as a reader sees it: by roles, without special tokens, code in its own blocks. */
function rendered({ prompt = "", response = "" }) {
  const text = prompt + response;
  const found = [...text.matchAll(OPENS)];
  const messages = found.length
    ? [
        ["", text.slice(0, found[0].index)],
        ...found.map((match, at) => {
          const role = match.slice(1).find(Boolean);
          return [ROLES[role] ?? role, text.slice(match.index + match[0].length, found[at + 1]?.index)];
        }),
      ]
    : [
        ["prompt", prompt],
        ["reply", response],
      ];
  return h(
    "div",
    {},
    messages
      .map(([role, content]) => [role, content.replace(ENDS, "").trim()])
      .filter(([role, content]) => role || content)
      .map(([role, content]) =>
        h(
          "div",
          { class: `said ${role === "assistant" || role === "reply" ? "reply-side" : ""}` },
          h("div", { class: "who" }, t(role)),
          content
            .split(/```\w*\n([\s\S]*?)```/)
            .map((part, at) => (at % 2 ? h("pre", {}, shown(part)) : h("div", { class: "plain-text" }, shown(part)))),
        ),
      ),
  );
}

function conversation(record, tokens, color) {
  if (!tokens.length)
    return [
      ["prompt", record.prompt],
      ["turn", record.response],
    ].map(([kind, text]) =>
      h(
        "div",
        { class: `message ${kind}` },
        h("div", { class: "who" }, t(kind)),
        h("div", { class: "text" }, shown(text)),
      ),
    );
  const rewards = record.turn_rewards ?? [];
  const seconds = (name, turn) => {
    const value = record[name]?.[turn - 1];
    return typeof value === "number" ? ` · ${t(name)} ${number(value, 3)} s` : "";
  };
  return segmentsOf(tokens).map(({ kind, turn, tokens: part }) => {
    const about =
      kind === "turn"
        ? [
            ` ${turn}`,
            rewards.length > 1 && rewards[turn - 1] !== undefined
              ? ` · ${t("reward")} ${number(rewards[turn - 1], 4)}`
              : "",
            seconds("generate_s", turn),
            seconds("environment_s", turn),
          ]
        : "";
    return h(
      "div",
      { class: `message ${kind}` },
      h("div", { class: "who" }, t(kind), about, h("span", { class: "quiet" }, ` · ${part.length} ${t("tokens")}`)),
      h("div", { class: "text" }, tokenSpans(part, color)),
    );
  });
}

function tree(all, color, here, rewards) {
  const node = ({ tokens, ended, children }) =>
    h(
      "div",
      { class: "node", "data-sample": null },
      tokens.length || ended.length
        ? h("div", { class: "segment" }, shortened(tokens, color), ended.length ? leaves(ended) : null)
        : null,
      children.length
        ? h(
            "div",
            { class: "children" },
            children.map((child) => {
              const drawn = node(child);
              drawn.dataset.sample = leaf(child).sample.index;
              return drawn;
            }),
          )
        : null,
    );
  const root = node(treeOf(all));
  root.dataset.sample = all[0].sample.index;
  return h("div", { class: "tree" }, root);

  function leaves(ended) {
    const label = (one) => `${t("sample")} ${one.sample}: ${number(one.reward, 3)}`;
    const samples = ended.map((one) => one.sample);
    return sampleCells(samples, (one) => `${here}/${one.index}`, rewards, null, label);
  }

  // Which sample a node's numbers are of: the first that goes through it, as in `treeOf`.
  function leaf(child) {
    return all.find((one) => one.tokens.includes(child.tokens[0])) ?? child.ended[0] ?? all[0];
  }
}

function shortened(tokens, color) {
  if (tokens.length <= SHORT_START + SHORT_END + 10) return tokens.map((token) => tokenSpan(token, color));
  const middle = tokens.slice(SHORT_START, -SHORT_END);
  const more = h("button", { type: "button", class: "link" }, ` … ${middle.length} ${t("tokens")} … `);
  more.addEventListener("click", () => more.replaceWith(...tokenSpans(middle, color)));
  return [
    tokens.slice(0, SHORT_START).map((token) => tokenSpan(token, color)),
    more,
    tokens.slice(-SHORT_END).map((token) => tokenSpan(token, color)),
  ];
}

function beside(all, color, group, here, index) {
  if (all.length < 2) return h("p", { class: "quiet" }, t("This group has no other sample."));
  const at = firstDifference(all[0].tokens, all[1].tokens);
  const choose = h(
    "select",
    {
      "aria-label": t("other sample"),
      onchange: () => {
        location.hash = `${here}/${index}/beside/${choose.value}`;
      },
    },
    group
      .filter((one) => one.index !== Number(index))
      .map((one) =>
        h(
          "option",
          { value: one.index, selected: one.index === all[1].sample.index },
          `${t("sample")} ${one.sample}: ${number(one.reward, 3)}`,
        ),
      ),
  );
  const column = (one, head) =>
    h(
      "div",
      { "data-sample": one.sample.index },
      h("div", { class: "who" }, head),
      h(
        "div",
        { class: "message" },
        h(
          "div",
          { class: "text" },
          tokenSpans(one.tokens, color, (token) =>
            token.index < at ? "same" : token.index === at ? "first-difference" : "",
          ),
        ),
      ),
    );
  return [
    h(
      "p",
      { class: "quiet small" },
      at < Math.max(all[0].tokens.length, all[1].tokens.length)
        ? `${t("first difference at position")} ${at}`
        : t("They are the same."),
    ),
    h(
      "div",
      { class: "beside" },
      column(all[0], `${t("sample")} ${all[0].sample.sample}: ${number(all[0].sample.reward, 3)}`),
      column(all[1], choose),
    ),
  ];
}
