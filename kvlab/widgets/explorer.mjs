// The explorer: settings on the left, what they cost on the right. Every number comes from Python
// (kvlab.plan.explore, in the kernel or in the page's worker); this file only asks and draws.

import { backend, keepKeys, node, replace } from "./parts.mjs";

const GIB = 2 ** 30;
const PARTS = [
  ["weights", "Weights"],
  ["cache", "KV cache"],
  ["state", "Recurrent state"],
  ["overhead", "Overhead"],
];
const ATTENTION = [
  ["mha", "multi-head (MHA)"],
  ["gqa", "grouped-query (GQA)"],
  ["mqa", "multi-query (MQA)"],
  ["mla", "latent (MLA)"],
  ["sliding", "sliding window in every layer"],
  ["hybrid", "hybrid: windows, some layers full"],
  ["recurrent", "hybrid: recurrent states, some layers full"],
  ["compressed", "compressed entries and a window"],
];
const POLICY = {
  ideal: "ideal: only what carries data",
  paged: "paged: this engine's pages",
  vllm: "vllm: one pool for all layers",
};
let widgets = 0;

// ---- numbers for people -------------------------------------------------------------------------------------------

const whole = (n) => Math.round(n).toLocaleString("en-US");
const gib = (bytes) => `${(bytes / GIB).toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 })} GiB`;

function bytes(n) {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", GIB], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (n >= size) return `${(n / size).toLocaleString("en-US", { maximumFractionDigits: 2 })} ${unit}`;
  return `${whole(n)} B`;
}

const rate = (n) => (n >= 100 ? whole(n) : n.toLocaleString("en-US", { maximumSignificantDigits: 3 }));

function tokens(n) {
  if (n % 2 ** 20 === 0) return `${n / 2 ** 20}M`;
  return n % 1024 === 0 ? `${n / 1024}k` : String(n);
}

// ---- controls -----------------------------------------------------------------------------------------------------

function choice(name, label, options, value) {
  const select = node("select", { name });
  for (const option of options) {
    const [key, text] = Array.isArray(option) ? option : [option, option];
    select.append(node("option", { value: key, selected: String(key) === String(value) }, text));
  }
  return node("label", {}, node("span", {}, label), select);
}

function number(name, label, value, min, max) {
  return node("label", {}, node("span", {}, label),
    node("input", { type: "number", name, value, min, max, step: 1, inputmode: "numeric" }));
}

function powers(name, label, unit, value, low, high, show) {
  // A slider over powers of two; a value between two of them is kept until the slider moves.
  const output = node("output");
  const input = node("input", { type: "range", name, min: low, max: high, step: 1, value: Math.round(Math.log2(value)) });
  let exact = value;
  const tell = () => {
    output.textContent = show(exact);
    input.setAttribute("aria-valuetext", `${whole(exact)} ${unit}`);
  };
  input.addEventListener("input", () => {
    exact = 2 ** Number(input.value);
    tell();
  });
  input.exact = () => exact;
  tell();
  return node("label", {}, node("span", {}, `${label}: `, output), input);
}

function controls(params, data) {
  const shape = node("fieldset", { class: "kvx-shape" }, node("legend", {}, "Own shape"),
    choice("attention", "Attention", ATTENTION, params.attention),
    node("div", { class: "kvx-pair" },
      number("layers", "Layers", params.layers, 1, 512),
      number("head_dim", "Head dim (values)", params.head_dim, 8, 1024)),
    node("div", { class: "kvx-pair" },
      number("query_heads", "Query heads", params.query_heads, 1, 1024),
      number("kv_heads", "KV heads", params.kv_heads, 1, 1024)),
    node("div", { class: "kvx-pair" },
      number("window", "Window (tokens)", params.window, 1, 1048576),
      number("full_every", "One full layer in", params.full_every, 1, 1000)),
    node("div", { class: "kvx-pair" },
      number("latent_dim", "Latent (values)", params.latent_dim, 1, 8192),
      number("rope_dim", "Rotary key (values)", params.rope_dim, 0, 1024)),
    node("div", { class: "kvx-pair" },
      number("state_dim", "State per head (n x n values)", params.state_dim, 8, 1024),
      choice("ratio", "Tokens per entry", [4, 128], params.ratio)));
  return node("form", { class: "kvx-controls", "aria-label": "Settings of the explorer" },
    node("fieldset", {}, node("legend", {}, "Model"),
      choice("model", "Preset", [["own", "own shape"], ...data.models], params.model)),
    shape,
    node("fieldset", {}, node("legend", {}, "Storage"),
      node("div", { class: "kvx-pair" },
        choice("weight_dtype", "Weights", data.weight_formats, params.weight_dtype),
        choice("kv_dtype", "KV cache", data.kv_formats, params.kv_dtype))),
    node("fieldset", {}, node("legend", {}, "Serving"),
      powers("context", "Context", "tokens", params.context, 7, 20, (n) => `${whole(n)} tokens (${tokens(n)})`),
      powers("batch", "Batch", "sequences", params.batch, 0, 10, (n) => `${whole(n)} ${n === 1 ? "sequence" : "sequences"}`),
      choice("gpu", "GPU", data.gpus, params.gpu),
      choice("tp", "Tensor parallel (GPUs)", [1, 2, 4, 8, 16], params.tp),
      choice("policy", "Bytes counted as", data.policies.map((p) => [p, POLICY[p] ?? p]), params.policy)));
}

const RELEVANT = {
  kv_heads: (p) => ["gqa", "sliding", "hybrid", "recurrent"].includes(p.attention),
  full_every: (p) => ["hybrid", "recurrent"].includes(p.attention),
  window: (p) => ["sliding", "hybrid", "compressed"].includes(p.attention),
  state_dim: (p) => p.attention === "recurrent",
  ratio: (p) => p.attention === "compressed",
  latent_dim: (p) => p.attention === "mla",
  rope_dim: (p) => p.attention === "mla",
};

function readParams(form) {
  const params = {};
  for (const input of form.elements) {
    if (!input.name) continue;
    if (input.type === "range") params[input.name] = input.exact();
    else if (input.type === "number" || ["tp", "ratio"].includes(input.name)) params[input.name] = Number(input.value);
    else params[input.name] = input.value;
  }
  return params;
}

function showRelevant(form, params) {
  form.querySelector(".kvx-shape").hidden = params.model !== "own";
  for (const [name, needed] of Object.entries(RELEVANT)) form.elements[name].closest("label").hidden = !needed(params);
  for (const pair of form.querySelectorAll(".kvx-pair")) pair.hidden = !pair.querySelector("label:not([hidden])");
}

// ---- drawing ------------------------------------------------------------------------------------------------------

function patterns(uid) {
  // The second channel beside colour: plain, diagonal, dots, crosses.
  const marks = {
    cache: "M0,8 L8,0 M-2,2 L2,-2 M6,10 L10,6",
    state: null,
    overhead: "M0,4 H8 M4,0 V8",
  };
  const defs = node("defs");
  for (const [part, path] of Object.entries(marks))
    defs.append(node("pattern", { id: `${uid}-${part}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
      node("rect", { width: 8, height: 8, style: `fill: var(--kvx-${part})` }),
      path
        ? node("path", { d: path, style: "stroke: var(--kvx-ink); stroke-width: 1.4; fill: none" })
        : node("circle", { cx: 4, cy: 4, r: 1.6, style: "fill: var(--kvx-ink)" })));
  return defs;
}

const fill = (uid, part) => (part === "weights" ? "fill: var(--kvx-weights)" : `fill: url(#${uid}-${part})`);

const EDGE = "stroke: var(--kvx-text); stroke-width: 1";
const percent = (n, of) => `${(100 * n) / of}%`;

function memoryBar(uid, memory, used) {
  // positions in percent and no viewBox: text and patterns keep their size at any width
  const end = Math.max(memory.capacity_bytes, used);
  const svg = node("svg", { width: "100%", height: 44, role: "img",
    "aria-label": `Memory of one GPU: ${gib(used)} of ${gib(memory.capacity_bytes)} needed` }, patterns(uid));
  let at = 0;
  for (const [part, label] of PARTS) {
    const size = memory[`${part}_bytes`];
    if (!size) continue;
    svg.append(node("rect", { class: `kvx-part-${part}`, x: percent(at, end), y: 5, width: percent(size, end), height: 34,
      style: `${fill(uid, part)}; ${EDGE}` }, node("title", {}, `${label}: ${gib(size)}`)));
    at += size;
  }
  const limit = percent(memory.capacity_bytes, end);
  svg.append(node("rect", { x: 0, y: 5, width: limit, height: 34, style: `fill: none; ${EDGE}` }),
    node("line", { x1: limit, x2: limit, y1: 0, y2: 44, style: "stroke: var(--kvx-text); stroke-width: 4" }));
  return node("div", { class: "kvx-bar" }, svg, node("p", { class: "kvx-scale" }, node("span", {}, "0"),
    node("span", {}, used > memory.capacity_bytes
      ? `capacity ${gib(memory.capacity_bytes)} (thick line), needed ${gib(used)}`
      : `capacity ${gib(memory.capacity_bytes)}`)));
}

function memoryKeys(uid, memory, used) {
  const rows = PARTS.map(([part, label]) =>
    node("li", { "data-part": part },
      node("svg", { viewBox: "0 0 20 14", "aria-hidden": "true" },
        node("rect", { x: 0.5, y: 0.5, width: 19, height: 13, style: `${fill(uid, part)}; stroke: var(--kvx-text)` })),
      node("span", {}, label), node("b", {}, gib(memory[`${part}_bytes`]))));
  const free = memory.capacity_bytes - used;
  rows.push(node("li", { "data-part": "free" }, node("span", { "aria-hidden": "true" }, free < 0 ? "!" : ""),
    node("span", {}, free < 0 ? "Missing" : "Free"), node("b", {}, gib(Math.abs(free)))));
  return node("ul", { class: "kvx-keys" }, ...rows);
}

function card(name, term, value, detail) {
  return node("div", { "data-figure": name }, node("dt", {}, term), node("dd", {}, value),
    detail ? node("dd", { class: "kvx-note" }, detail) : null);
}

function quality(data, params) {
  const recorded = data.quality;
  const row = recorded?.formats?.[params.kv_dtype];
  const about = recorded?.conditions ?? "";
  const baseline = recorded?.baseline;
  const title = node("h4", {}, `Quality of a ${params.kv_dtype} cache`);
  if (!row) return [title, node("p", { class: "kvx-note" }, `Not measured for ${params.kv_dtype}. ${about}`)];
  const band = ([low, high], digits) => `95% band ${low.toPrecision(digits)} to ${high.toPrecision(digits)}`;
  return [title,
    node("dl", { class: "kvx-cards" },
      card("kl", "KL from full precision (nats per token)", row.kl.mean.toPrecision(3), band(row.kl.band95, 3)),
      card("perplexity", "Perplexity", row.perplexity.mean.toFixed(3), `full precision: ${baseline.perplexity.mean.toFixed(3)}`),
      card("top1", "Same first choice", `${(100 * row.top1.mean).toFixed(2)} %`, "of the tokens")),
    node("p", { class: "kvx-note" }, about)];
}

function summarize(state) {
  const p = state.params;
  const used = PARTS.reduce((sum, [part]) => sum + state.memory[`${part}_bytes`], 0);
  const fits = used <= state.memory.capacity_bytes;
  return `${state.name} on ${p.tp} x ${state.gpu}: ` +
    `${whole(p.batch)} ${p.batch === 1 ? "sequence" : "sequences"} of ${whole(p.context)} tokens ` +
    `${p.batch === 1 ? "needs" : "need"} ${gib(used)} of ${gib(state.memory.capacity_bytes)} per GPU` +
    `${fits ? "" : ", which does not fit"}; ${whole(state.max_concurrent)} would fit; ` +
    `decoding is bound by ${state.decode.bound}.`;
}

function results(uid, state, data) {
  const memory = state.memory;
  const used = PARTS.reduce((sum, [part]) => sum + memory[`${part}_bytes`], 0);
  const p = state.params;
  return [
    node("div", {}, node("h4", {}, `Memory of one GPU (${state.gpu})`), memoryBar(uid, memory, used), memoryKeys(uid, memory, used)),
    node("dl", { class: "kvx-cards" },
      card("max_concurrent", "Sequences that fit", whole(state.max_concurrent), `of ${whole(p.context)} tokens each`),
      card("tokens_per_s", "Decode speed (tokens/s)", rate(state.decode.tokens_per_s),
        `all ${whole(p.batch)} together; ${rate(state.decode.tokens_per_s / p.batch)} each; bound by ${state.decode.bound}`),
      card("kv_bytes", "Cache of one sequence", bytes(state.kv_bytes), `${whole(state.kv_bytes)} bytes at ${whole(p.context)} tokens`),
      card("kv_bytes_per_token_at_context", "The next token adds", bytes(state.kv_bytes_per_token_at_context),
        "to one sequence, over all GPUs")),
    node("div", { class: "kvx-quality" }, ...quality(data, p)),
    node("p", { class: "kvx-note", "data-part": "gpu" }, data.gpu?.models?.[p.model] ?? data.gpu?.text ?? ""),
    node("div", {}, node("h4", {}, "The same in a terminal"),
      node("pre", { class: "kvx-command", tabindex: 0, "aria-label": "The command" }, state.command ?? "")),
    state.notes?.length
      ? node("details", { class: "kvx-note" }, node("summary", {}, "Assumptions"), node("ul", {}, ...state.notes.map((n) => node("li", {}, n))))
      : null,
  ];
}

// ---- measure (kernel only) ----------------------------------------------------------------------------------------

function pairOfBars(title, unit, predicted, measured, show, uid) {
  const end = Math.max(predicted, measured) || 1;
  const bar = (label, value, part) => [
    node("span", {}, label),
    node("svg", { width: "100%", height: 22, "aria-hidden": "true" }, patterns(`${uid}-${part}`),
      node("rect", { class: `kvx-measured-${label}`, x: 0, y: 1, width: percent(value, end), height: 20, style: `${fill(`${uid}-${part}`, part)}; ${EDGE}` })),
    node("b", {}, show(value)),
  ];
  return node("div", { class: "kvx-bars", role: "group", "aria-label": `${title}: predicted ${show(predicted)}, measured ${show(measured)}` },
    node("h4", {}, `${title} (${unit})`), ...bar("predicted", predicted, "weights"), ...bar("measured", measured, "cache"));
}

function measurePanel(uid, talk, current) {
  const start = node("button", { type: "button", class: "kvx-measure" }, "Measure");
  const cancel = node("button", { type: "button", class: "kvx-cancel", hidden: true }, "Cancel");
  const line = node("span", { role: "status" });
  const out = node("div", { class: "kvx-measured" });
  let id = 0;
  start.addEventListener("click", () => {
    id += 1;
    start.disabled = true;
    cancel.hidden = false;
    line.textContent = "starting";
    replace(out);
    talk.tell({ kind: "measure", id, params: current() });
  });
  cancel.addEventListener("click", () => talk.tell({ kind: "cancel", id }));
  talk.listen((message) => {
    if (message.kind === "progress" && message.id === id) line.textContent = message.text;
    if (message.kind !== "measured" || message.id !== id) return;
    start.disabled = false;
    cancel.hidden = true;
    line.textContent = message.ok ? message.result.sentence : message.error;
    if (!message.ok) return;
    const r = message.result;
    replace(out,
      pairOfBars("Cache", "bytes", r.predicted.kv_bytes, r.measured.kv_bytes, bytes, `${uid}-mb`),
      pairOfBars("Decode", "tokens/s", r.predicted.tokens_per_s, r.measured.tokens_per_s, rate, `${uid}-mt`),
      node("ul", { class: "kvx-note" }, ...r.conditions.map((text) => node("li", {}, text))));
  });
  return node("div", { class: "kvx-measure-panel" }, node("h4", {}, "Measure it here"),
    node("p", { class: "kvx-note" }, "Builds this shape with random weights, cut to what this device can hold, fills its cache and decodes."),
    node("div", { class: "kvx-row" }, start, cancel, line), out);
}

// ---- the widget ---------------------------------------------------------------------------------------------------

function render({ model, el }) {
  const uid = `kvx${++widgets}`;
  const data = model.get("data");
  const talk = backend(model);
  const form = controls(model.get("params"), data);
  const summary = node("p", { class: "kvx-summary", "aria-live": "polite" });
  const error = node("p", { class: "kvx-error", role: "alert" });
  const shown = node("div", { class: "kvx-results" });
  const fresh = node("div", { class: "kvx-results" });
  let asked = 0;
  let timer = null;

  const draw = (state) => {
    summary.textContent = summarize(state);
    error.textContent = "";
    replace(fresh, ...results(uid, state, data));
  };
  const ask = async () => {
    const params = readParams(form);
    const turn = ++asked;
    shown.classList.add("kvx-busy");
    el.dataset.busy = "true";
    try {
      const state = await talk.compute(params);
      if (turn !== asked) return;
      model.set("params", params);
      model.set("state", state);
      model.save_changes();
      draw(state);
    } catch (fault) {
      if (turn === asked) error.textContent = fault.message;
    }
    shown.classList.remove("kvx-busy");
    el.dataset.busy = "false";
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    showRelevant(form, readParams(form));
    el.dataset.busy = "true";
    clearTimeout(timer);
    timer = setTimeout(ask, 120);
  });

  shown.append(summary, error, fresh);
  if (model.get("backend") === "kernel") shown.append(measurePanel(uid, talk, () => readParams(form)));
  const root = node("section", { class: "kvx", "aria-label": "KV cache explorer" }, node("div", { class: "kvx-grid" }, form, shown));
  showRelevant(form, model.get("params"));
  draw(model.get("state"));
  el.append(root);
  el.dataset.busy = "false";
  const release = keepKeys(model, root);
  return () => {
    release();
    clearTimeout(timer);
    talk.close();
  };
}

export default { render };
