// Mounts a live widget in a published page: the widget's own .mjs, a stand-in for anywidget's model, and Python in a
// worker that starts when the reader first changes a setting. One worker serves all widgets of a page.

class Python {
  // A worker that answers messages, started on demand; stop() ends it at once, the next request starts a new one.
  constructor(root) {
    this.root = root;
    this.listeners = new Set();
    this.waiting = new Map();
    this.worker = null;
    this.next = 1;
    this.status = { phase: "idle" };
  }

  report(status) {
    this.status = status;
    for (const listener of this.listeners) listener(status);
  }

  start() {
    this.ready = new Promise((resolve, reject) => {
      this.refuse = reject;
      const worker = new Worker(new URL("widgets/worker.js", this.root), { type: "module" });
      worker.onmessage = ({ data }) => {
        if (worker !== this.worker) return;
        if (data.type === "progress") this.report({ phase: "starting", ...data });
        else if (data.type === "ready") {
          this.report({ phase: "ready", version: data.version });
          resolve();
        } else if (data.type === "reply") this.settle(data.reply);
        else if (data.type === "told") this.pass(data.told);
        else this.fail(data.error);
      };
      worker.onerror = (event) => worker === this.worker && this.fail(event.message ?? "the worker did not start");
      this.worker = worker;
      this.report({ phase: "starting", step: 0, steps: 3, text: "starting" });
      worker.postMessage({ type: "start", root: this.root.href });
    });
    this.ready.catch(() => {});
  }

  async request(widget, message, told) {
    if (!this.worker) this.start();
    const key = this.next++;
    const reply = new Promise((resolve) => this.waiting.set(key, { resolve, id: message.id, told }));
    try {
      await this.ready;
      this.worker?.postMessage({ type: "message", widget, message: { ...message, id: key } });
    } catch {
      // fail() and stop() have answered every waiting request
    }
    return reply;
  }

  settle(reply) {
    const entry = this.waiting.get(reply.id);
    this.waiting.delete(reply.id);
    entry?.resolve({ ...reply, id: entry.id });
  }

  pass(told) {
    const entry = this.waiting.get(told.id);
    entry?.told?.({ ...told, id: entry.id });
  }

  end(status, error) {
    this.worker?.terminate();
    this.worker = null;
    this.refuse?.(new Error(error));
    for (const { resolve, id } of this.waiting.values()) resolve({ kind: "reply", id, ok: false, error });
    this.waiting.clear();
    this.report(status);
  }

  fail(error) {
    this.end({ phase: "failed", error }, `Python did not run in this page: ${error}`);
  }

  stop() {
    this.end({ phase: "stopped" }, "stopped; change a setting to start again");
  }
}

class PageModel {
  // What a front end uses of anywidget's model: get, set, save_changes, on, off, send.
  constructor(payload, python) {
    this.values = { ...payload, backend: "pyodide" };
    this.python = python;
    this.handlers = new Map();
  }
  get(key) { return this.values[key]; }
  set(key, value) {
    this.values[key] = value;
    this.emit(`change:${key}`, value);
  }
  save_changes() {}
  on(event, handler) { this.handlers.set(event, [...(this.handlers.get(event) ?? []), handler]); }
  off(event, handler) {
    this.handlers.set(event, (this.handlers.get(event) ?? []).filter((h) => handler && h !== handler));
  }
  emit(event, ...args) { for (const handler of this.handlers.get(event) ?? []) handler(...args); }
  async send(message) {
    if (message.kind === "cancel") return this.python.stop();
    const told = (progress) => this.emit("msg:custom", progress);
    return this.emit("msg:custom", await this.python.request(this.values.widget, message, told));
  }
}

function statusBar(python) {
  // One line under the widget that says where its numbers come from, and a button that stops Python.
  const bar = document.createElement("div");
  bar.className = "kvlab-live-status";
  const text = document.createElement("span");
  text.setAttribute("role", "status");
  const meter = document.createElement("progress");
  meter.setAttribute("aria-label", "starting Python in this page");
  const stop = document.createElement("button");
  stop.type = "button";
  stop.textContent = "Stop Python";
  stop.addEventListener("click", () => python.stop());
  bar.append(text, meter, stop);
  let begun = 0;
  const show = (status) => {
    bar.dataset.phase = status.phase;
    if (status.phase === "starting" && !status.step) begun = performance.now();
    meter.hidden = status.phase !== "starting";
    stop.hidden = !["starting", "ready"].includes(status.phase);
    stop.textContent = status.phase === "starting" ? "Cancel" : "Stop Python";
    if (status.phase === "starting") {
      meter.max = status.steps + 1;
      meter.value = status.step;
    }
    const seconds = ((performance.now() - begun) / 1000).toFixed(1);
    text.textContent = {
      idle: "Computed when the book was built. Change a setting and Python starts in this page (13 MB, once).",
      starting: `Starting Python in this page: ${status.text ?? ""}`,
      ready: `Computed in this page by kvlab on Python ${status.version} (Pyodide, ready in ${seconds} s).`,
      stopped: "Python is stopped. Change a setting to start it again.",
      failed: `Python did not start: ${status.error}. The values shown are from the build.`,
    }[status.phase];
  };
  python.listeners.add(show);
  show(python.status);
  return bar;
}

function addStyle(url) {
  if (document.querySelector(`link[href="${url}"]`)) return Promise.resolve();
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = url;
  return new Promise((resolve) => {
    link.onload = link.onerror = resolve;
    document.head.append(link);
  });
}

let python = null;

export async function mount(element, root) {
  const payload = JSON.parse(element.querySelector('script[type="application/json"]').textContent);
  const name = payload.widget;
  python ??= new Python(root);
  const [module] = await Promise.all([
    import(new URL(`widgets/${name}.mjs`, root)),
    addStyle(new URL("widgets/live.css", root).href),
    addStyle(new URL(`widgets/${name}.css`, root).href),
  ]);
  const place = document.createElement("div");
  const fallback = element.querySelector(".kvlab-live-fallback");
  const folded = document.createElement("details");
  folded.className = "kvlab-live-folded";
  const summary = document.createElement("summary");
  summary.textContent = payload.data.folded ?? "The same as a table, for a few settings";
  folded.append(summary, fallback);
  element.prepend(place, statusBar(python));
  element.append(folded);
  await module.default.render({ model: new PageModel(payload, python), el: place });
  element.dataset.mounted = "true";
}
