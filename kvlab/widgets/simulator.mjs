// The simulator: a pasted trace, a model and a machine on top, what comes of it below. Python (kvlab.simulate, in the
// kernel or in the page's worker) runs the scheduler and says how far it is; this file asks, cancels and draws.

import { backend, keepKeys, node, replace } from "./parts.mjs";

function pick(name, label, options, value) {
  return node("label", {}, node("span", {}, label),
    node("select", { name }, ...options.map((key) => node("option", { value: key, selected: key === value }, key))));
}

function number(name, label, value, min, max, step) {
  return node("label", {}, node("span", {}, label), node("input", { type: "number", name, value, min, max, step }));
}

function settings(params, data) {
  const form = node("form", { class: "kvs-trace", "aria-label": "Settings of the simulation" },
    node("label", {}, node("span", {}, "Trace: JSON lines with timestamp, input_length, output_length, hash_ids; or CSV with a header"),
      node("textarea", { name: "trace", spellcheck: "false", wrap: "off" })),
    node("div", { class: "kvs-fields" },
      pick("model", "Model", data.models, params.model), pick("gpu", "GPU", data.gpus, params.gpu),
      number("tp", "GPUs together", params.tp, 1, 16, 1), pick("weight_dtype", "Weights", data.weights, params.weight_dtype),
      pick("prefix", "Prefix cache", data.prefix, params.prefix),
      number("rate", "Requests/s, if untimed", params.rate, 0.01, 10000, "any"), number("rows", "Rows at most", params.rows, 1, 5000, 1)));
  form.elements.trace.value = params.trace;
  form.read = () => {
    const found = {};
    for (const input of form.elements) if (input.name) found[input.name] = input.type === "number" ? Number(input.value) : input.value;
    return found;
  };
  return form;
}

function results(state) {
  const cards = state.cards.map(([term, value, detail]) => node("div", { "data-figure": term }, node("dt", {}, term),
    node("dd", {}, value), node("dd", { class: "kvs-note", style: "font-size: 0.85rem" }, detail)));
  const rows = state.rows.map(([name, ...cells]) => node("tr", {}, node("th", { scope: "row" }, name), ...cells.map((c) => node("td", {}, c))));
  return [node("h4", { class: "kvs-title" }, state.title + (state.cancelled ? " (stopped before the end)" : "")),
    node("dl", { class: "kvs-cards" }, ...cards),
    node("div", { class: "kvs-scroll", tabindex: 0, role: "group", "aria-label": "Latencies by length" },
      node("table", {}, node("caption", {}, "Latencies by length of the prompt"), node("thead", {}, node("tr", {},
        ...state.head.map((text) => node("th", { scope: "col" }, text)))), node("tbody", {}, ...rows))),
    node("ul", { class: "kvs-notes" }, ...state.notes.map((text) => node("li", {}, text)))];
}

function render({ model, el }) {
  const talk = backend(model);
  const form = settings(model.get("params"), model.get("data"));
  const start = node("button", { type: "button", class: "kvs-start" }, "Simulate");
  const cancel = node("button", { type: "button", class: "kvs-cancel", hidden: true }, "Cancel");
  const meter = node("progress", { hidden: true, "aria-label": "Requests ended" });
  const line = node("span", { role: "status" });
  const error = node("p", { class: "kvs-error", role: "alert" });
  const out = node("div", { class: "kvs-results" });
  const run = async () => {
    start.disabled = true;
    cancel.hidden = meter.hidden = false;
    meter.removeAttribute("value");
    error.textContent = line.textContent = "";
    el.dataset.busy = "true";
    try {
      const state = await talk.compute(form.read());
      model.set("params", state.params);
      model.set("state", state);
      model.save_changes();
      replace(out, ...results(state));
    } catch (fault) {
      error.textContent = fault.message;
    }
    start.disabled = false;
    cancel.hidden = meter.hidden = true;
    line.textContent = "";
    el.dataset.busy = "false";
  };
  start.addEventListener("click", run);
  cancel.addEventListener("click", () => talk.tell({ kind: "cancel" }));
  form.addEventListener("submit", (event) => event.preventDefault());
  talk.listen((message) => {
    if (message.kind !== "progress") return;
    meter.max = message.of;
    meter.value = message.done;
    line.textContent = message.text;
  });
  const root = node("section", { class: "kvs", "aria-label": "Simulate a trace" }, form,
    node("div", { class: "kvs-row" }, start, cancel, meter, line), error, out);
  replace(out, ...results(model.get("state")));
  el.append(root);
  el.dataset.busy = "false";
  const release = keepKeys(model, root);
  return () => {
    release();
    talk.close();
  };
}

export default { render };
