// The step-through: pool, tables, free list and queue after every step, forwards and backwards. Every step was computed
// in Python (kvlab.schedule.story, or a recording of a real engine); this file draws one snapshot and what changed in it.

import { backend, keepKeys, node, replace } from "./parts.mjs";

const PHASES = {
  taken: "pages are handed out, the model is about to run",
  done: "the step's tokens are certain",
};
const CHOICES = [
  ["layers", "Layers", { full: "keep every token", window: "keep a window", both: "one of each" }],
  ["prefix", "Prefix cache", { off: "off", hash: "hash chain", radix: "radix tree" }],
  ["order", "Who is admitted", { fcfs: "first come", longest_prefix: "longest prefix in the cache" }],
  ["victim", "Who gives way", { last: "last arrived", least_progress: "least progress", cheapest: "cheapest to redo" }],
];
const NUMBERS = [
  ["block_size", "Tokens per page", 1, 64],
  ["pages", "Pages in the pool", 1, 200],
  ["budget", "Tokens per step", 1, 512],
  ["max_seqs", "Requests at once", 1, 8],
  ["window", "Window (tokens)", 1, 512],
];
const COLUMNS = [["Prompt", 1, 500], ["New tokens", 1, 100], ["Arrives after step", 0, 200], ["Shared beginning", 0, 500]];
const NAMES = "ABCDEFGH";
const MOST_SLOTS = 16; // drawn one by one up to here, as a bar above

const many = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

// ---- what a snapshot says -----------------------------------------------------------------------------------------

function ranges(numbers) {
  // [4, 5, 6, 9] -> "4-6, 9"
  const runs = [];
  for (const n of numbers)
    if (runs.length && n === runs.at(-1)[1] + 1) runs.at(-1)[1] = n;
    else runs.push([n, n]);
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(", ");
}

function holders(state, shot, pool) {
  // page -> [[request, entry, group]] of every table that names it
  const found = new Map();
  for (const [name, tables] of Object.entries(shot.tables))
    tables.forEach((table, group) => {
      if (state.pool_of[group] !== pool) return;
      table.forEach((page, entry) => page && found.set(page, [...(found.get(page) ?? []), [name, entry, group]]));
    });
  return found;
}

function slots(state, shot, [name, entry, group]) {
  // what each slot of a page holds: "full" (certain), "writing" (this step's) or "empty"
  const [, size, rule] = state.groups[group];
  if (!["all", "window", "chunk"].includes(rule)) return [];
  const computed = shot.requests[name]?.[1] ?? 0;
  const chunk = shot.phase === "taken" ? shot.chunks.find(([id]) => id === name) : null;
  const end = chunk ? chunk[1] + chunk[2] : computed;
  return Array.from({ length: size }, (_, i) => {
    const at = entry * size + i;
    return at < computed ? "full" : at < end ? "writing" : "empty";
  });
}

// ---- drawing ------------------------------------------------------------------------------------------------------

const hidden = (text) => node("span", { class: "kvs-hidden" }, text);
const letter = (name) => (NAMES.includes(name) ? name : NAMES[Number(name) % NAMES.length] ?? "A");

function chip(name, note) {
  return node("li", { class: `kvs-chip kvs-${letter(name)}` }, node("b", {}, name), note ? ` ${note}` : "");
}

function slotMarks(marks) {
  if (marks.length <= MOST_SLOTS)
    return node("span", { class: "kvs-slots", "aria-hidden": "true" }, ...marks.map((mark) => node("i", { class: mark })));
  const share = (mark) => `${(100 * marks.filter((m) => m === mark).length) / marks.length}%`;
  return node("span", { class: "kvs-slots kvs-bar", "aria-hidden": "true" },
    ...["full", "writing"].map((mark) => node("i", { class: mark, style: `width: ${share(mark)}` })));
}

function page(state, shot, pool, number, held, before) {
  const cached = shot.cached?.[pool][number];
  const change = held && !before ? "new" : !held && before ? "back" : "";
  const owners = held ?? [];
  const marks = owners.length ? slots(state, shot, owners[0]) : [];
  const used = marks.filter((mark) => mark !== "empty").length;
  const who = owners.map(([name, entry]) => `${name} entry ${entry}`).join(", ");
  const said = `page ${number}: ` + (owners.length ? who : cached ? "kept" : "free") +
    (marks.length ? `, ${used} of ${marks.length} slots` : "") + (cached ? `, findable by tokens ${cached}` : "") +
    (change === "new" ? ", taken now" : change === "back" ? ", given back now" : "");
  const tag = owners.length ? owners.map(([name, entry]) => `${name}${entry}`).join(" ") : cached ? "kept" : "free";
  return node("li", {
    class: `kvs-page ${owners.length ? `kvs-${letter(owners[0][0])}` : "kvs-free"} ${change}${cached ? " kvs-cached" : ""}`,
    "data-page": number, "data-held": owners.map(([name, entry]) => `${name}:${entry}`).join(" "), title: said,
  }, hidden(said), node("span", { "aria-hidden": "true", class: "kvs-number" },
    `${number}${change === "new" ? " +" : change === "back" ? " −" : ""}`),
  node("span", { "aria-hidden": "true", class: "kvs-owner" }, tag), marks.length ? slotMarks(marks) : null);
}

function pools(state, shot, before) {
  return state.pools.map((count, pool) => {
    const now = holders(state, shot, pool);
    const then = before ? holders(state, before, pool) : new Map();
    const kinds = state.groups.filter((_, g) => state.pool_of[g] === pool).map(([name, size]) => `${name}, ${many(size, "token")} a page`);
    const free = shot.free[pool];
    const cells = Array.from({ length: count }, (_, i) => page(state, shot, pool, i + 1, now.get(i + 1), then.get(i + 1)));
    return node("div", { class: "kvs-pool-box" },
      node("h4", {}, `Pool (${kinds.join("; ")}): ${free.length} of ${count} free`),
      node("ol", { class: "kvs-pool" }, ...cells),
      node("p", { class: "kvs-list", "data-free": free.join(",") }, node("b", {}, "Free list, next first: "),
        free.length ? free.join(" · ") : "empty"),
      shot.idle ? node("p", { class: "kvs-list", "data-idle": shot.idle[pool].join(",") },
        node("b", {}, "Kept and unused, next to be evicted first: "), shot.idle[pool].join(" · ") || "none") : null);
  });
}

function tables(state, shot) {
  const rows = [];
  for (const [name, held] of Object.entries(shot.tables))
    held.forEach((table, group) => {
      const [known, computed] = shot.requests[name] ?? [0, 0];
      const cells = table.map((number) => node("li", { class: number ? "" : "kvs-null" }, number ? String(number) : "0",
        number ? null : hidden(" (nothing held)")));
      rows.push(node("tr", { class: `kvs-${letter(name)}`, "data-table": `${name}:${group}:${table.join(",")}` },
        node("th", { scope: "row" }, name), node("td", {}, state.groups[group][0]),
        node("td", { class: "kvs-num" }, `${computed} of ${known}`), node("td", {}, node("ol", { class: "kvs-table" }, ...cells))));
    });
  if (!rows.length) return node("p", { class: "kvs-list" }, node("b", {}, "Block tables: "), "none, nobody holds a page");
  const head = ["Request", "Layers", "Tokens computed", "Page of entry 0, 1, 2, ..."];
  return node("div", { class: "kvs-scroll", tabindex: 0, role: "group", "aria-label": "Block tables" },
    node("table", {}, node("caption", {}, "Block tables"),
      node("thead", {}, node("tr", {}, ...head.map((text) => node("th", { scope: "col" }, text)))),
      node("tbody", {}, ...rows)));
}

function queue(shot) {
  const ended = Object.entries(shot.requests).filter(([, [, , at]]) => !["waiting", "running"].includes(at));
  const line = (label, chips) => node("div", { class: "kvs-queue", "data-queue": label },
    node("b", {}, label), chips.length ? node("ul", {}, ...chips) : node("span", {}, "nobody"));
  const missing = (name) => `${shot.requests[name][0] - shot.requests[name][1]} to compute`;
  return [line("Waiting", shot.waiting.map((name) => chip(name, missing(name)))),
    line("Running", shot.running.map((name) => chip(name, missing(name)))),
    line("Ended", ended.map(([name, [known, , reason]]) => chip(name, `${reason}, ${many(known, "token")}`)))];
}

function batch(shot) {
  if (shot.phase !== "taken" || !shot.chunks.length) return null;
  const total = shot.chunks.reduce((sum, [, , count]) => sum + count, 0);
  return node("p", { class: "kvs-list" }, node("b", {}, `The batch, ${many(total, "token")} (positions into slots): `),
    shot.chunks.map(([name, start, count, , places]) =>
      `${name} at ${ranges(Array.from({ length: count }, (_, i) => start + i))} into ${ranges(places)}`).join("; "));
}

function prefixes(shot) {
  if (!shot.prefix) return null;
  const branch = (entry) => node("li", {}, node("code", {}, entry.label), ` ${entry.text}`,
    entry.children?.length ? node("ul", {}, ...entry.children.map(branch)) : null);
  const name = shot.prefix.design === "radix" ? "Radix tree: positions, and what lies there" : "Hash chain: digests, and what lies there";
  return node("div", { class: "kvs-prefix" }, node("h4", {}, name),
    shot.prefix.entries.length ? node("ul", {}, ...shot.prefix.entries.map(branch)) : node("p", { class: "kvs-list" }, "empty"));
}

function title(shot) {
  if (shot.phase === "start") return "Before the first step";
  return shot.phase === "end" ? "After the last step" : `Step ${shot.step}: ${PHASES[shot.phase]}`;
}

// ---- settings -----------------------------------------------------------------------------------------------------

function field(label, input) {
  return node("label", {}, node("span", {}, label), input);
}

function numberInput(name, value, min, max, label) {
  return node("input", { type: "number", name, value, min, max, step: 1, inputmode: "numeric", "aria-label": label });
}

function pick(name, options, value) {
  return node("select", { name }, ...options.map(([key, text]) => node("option", { value: key, selected: key === value }, text)));
}

function requestRow(k, row) {
  return node("tr", { class: `kvs-${NAMES[k]}` }, node("th", { scope: "row" }, NAMES[k]),
    ...COLUMNS.map(([label, low, high], i) =>
      node("td", {}, numberInput(`request${k}-${i}`, row[i], low, high, `${label}, request ${NAMES[k]}`))));
}

function settings(params, data) {
  const add = node("button", { type: "button", class: "kvs-add" }, "Add a request");
  const remove = node("button", { type: "button", class: "kvs-remove" }, "Remove the last");
  const body = node("tbody", {}, ...params.requests.map((row, k) => requestRow(k, row)));
  const choices = CHOICES.map(([name, label, texts]) =>
    field(label, pick(name, data.choices[name].map((key) => [key, texts[key] ?? key]), params[name])));
  const form = node("form", { class: "kvs-settings", "aria-label": "Settings of the story" },
    field("Story", pick("story", [["", "own"], ...Object.keys(data.stories).map((name) => [name, name])], "")),
    node("div", { class: "kvs-fields" },
      ...NUMBERS.map(([name, label, low, high]) => field(label, numberInput(name, params[name], low, high))),
      ...choices),
    node("div", { class: "kvs-scroll", tabindex: 0, role: "group", "aria-label": "Requests" },
      node("table", {}, node("caption", {}, "Requests, in tokens"), node("thead", {}, node("tr", {},
        ...["Request", ...COLUMNS.map(([label]) => label)].map((text) => node("th", { scope: "col" }, text)))), body)),
    node("div", { class: "kvs-row" }, add, remove));
  const changed = () => form.dispatchEvent(new Event("input", { bubbles: true }));
  add.addEventListener("click", () => {
    if (body.children.length < NAMES.length) body.append(requestRow(body.children.length, [8, 4, body.children.length, 0]));
    changed();
  });
  remove.addEventListener("click", () => {
    if (body.children.length > 1) body.lastChild.remove();
    changed();
  });
  form.fill = (next) => {
    for (const [name, value] of Object.entries(next)) if (form.elements[name]) form.elements[name].value = value;
    replace(body, ...next.requests.map((row, k) => requestRow(k, row)));
  };
  form.read = () => {
    const found = { requests: [...body.children].map((row) => [...row.querySelectorAll("input")].map((i) => Number(i.value))) };
    for (const input of form.elements)
      if (input.name && input.name !== "story" && !input.name.startsWith("request"))
        found[input.name] = input.type === "number" ? Number(input.value) : input.value;
    return found;
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  return form;
}

// ---- the widget ---------------------------------------------------------------------------------------------------

function controls(show) {
  const slider = node("input", { type: "range", min: 0, max: 0, value: 0, step: 1, "aria-label": "Step shown" });
  const button = (name, text, to) => {
    const made = node("button", { type: "button", class: `kvs-${name}` }, text);
    made.addEventListener("click", () => show(to(Number(slider.value), Number(slider.max))));
    return made;
  };
  slider.addEventListener("input", () => show(Number(slider.value)));
  const bar = node("div", { class: "kvs-row kvs-walk" }, button("first", "First", () => 0), button("back", "Back", (at) => at - 1),
    slider, button("next", "Next", (at) => at + 1), button("last", "Last", (_, end) => end));
  return { bar, slider };
}

function render({ model, el }) {
  const data = model.get("data");
  const talk = backend(model);
  let state = model.get("state");
  let at = 0;
  let asked = 0;
  let timer = null;
  const head = node("h4", { class: "kvs-title" });
  const events = node("ul", { class: "kvs-events", "aria-live": "polite" });
  const error = node("p", { class: "kvs-error", role: "alert" });
  const stage = node("div", { class: "kvs-stage" });

  const show = (to) => {
    const shots = state.snapshots;
    at = Math.max(0, Math.min(to, shots.length - 1));
    const shot = shots[at];
    slider.max = shots.length - 1;
    slider.value = at;
    slider.setAttribute("aria-valuetext", `${at} of ${shots.length - 1}: ${title(shot)}`);
    const [first, back, next, last] = ["first", "back", "next", "last"].map((name) => bar.querySelector(`.kvs-${name}`));
    first.disabled = back.disabled = at === 0;
    next.disabled = last.disabled = at === shots.length - 1;
    head.textContent = title(shot);
    replace(events, ...(shot.events.length ? shot.events.map(([kind, , text]) => node("li", { "data-kind": kind }, text)) : [node("li", {}, "Nothing yet.")]));
    replace(stage, node("div", {}, ...queue(shot)), batch(shot), ...pools(state, shot, shots[at - 1]), tables(state, shot), prefixes(shot),
      at === shots.length - 1 && state.cut ? node("p", { class: "kvs-error" }, "The record ends here; the requests go on.") : null);
  };
  const { bar, slider } = controls(show);
  const form = data.stories ? settings(model.get("params"), data) : null;

  const ask = async (restart) => {
    const turn = ++asked;
    try {
      const params = form.read();
      const found = await talk.compute(params);
      if (turn !== asked) return;
      state = found;
      model.set("params", found.params);
      model.set("state", found);
      model.save_changes();
      error.textContent = "";
      show(restart ? 0 : at);
    } catch (fault) {
      if (turn === asked) error.textContent = fault.message;
    }
    if (turn === asked) el.dataset.busy = "false";
  };
  form?.addEventListener("input", (event) => {
    const story = event.target.name === "story" ? event.target.value : "";
    if (story) form.fill({ ...data.defaults, ...data.stories[story] });
    else form.elements.story.value = "";
    el.dataset.busy = "true";
    clearTimeout(timer);
    timer = setTimeout(() => ask(Boolean(story)), 150);
  });

  const root = node("section", { class: "kvs", "aria-label": "Step through the block pool" }, bar, head, events, error, stage,
    form ? node("details", { class: "kvs-edit" }, node("summary", {}, "Change the story: pool, limits, requests"), form) : null);
  el.append(root);
  show(data.at ?? 0);
  el.dataset.busy = "false";
  const release = keepKeys(model, root);
  return () => {
    release();
    clearTimeout(timer);
    talk.close();
  };
}

export default { render };
