// What the front ends share: building elements, and asking Python.

export function node(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "text", "line", "path", "defs", "pattern", "g", "title", "circle"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes))
    if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  element.append(...children.filter((child) => child != null));
  return element;
}

export function replace(place, ...children) {
  place.replaceChildren(...children.filter((child) => child != null));
}

function hearTheKernel(model) {
  // anywidget 0.11 drops every message of the kernel to a widget whose module took over two seconds to load, for good
  // (AnyModel._handle_comm_msg waits for a promise that is rejected then): on a busy machine a widget would be deaf.
  // The class below anywidget's takes the messages instead; the model itself is what a change hands over.
  let own = null;
  const take = (changed) => { own = changed; };
  model.on("change:heard", take);
  model.set("heard", (model.get("heard") ?? 0) + 1);
  model.off("change:heard", take);
  const base = own && Object.getPrototypeOf(Object.getPrototypeOf(own));
  if (own?.comm && base?._handle_comm_msg) own.comm.on_msg((message) => base._handle_comm_msg.call(own, message));
}

export function backend(model) {
  // compute(params) -> Promise<state>; the same messages reach a kernel or the page's worker.
  if (model.get("backend") === "kernel") hearTheKernel(model);
  const waiting = new Map();
  const others = new Set();
  let next = 1;
  const receive = (message) => {
    if (message.kind !== "reply") return others.forEach((listener) => listener(message));
    const entry = waiting.get(message.id);
    waiting.delete(message.id);
    if (!entry) return undefined;
    return message.ok ? entry.resolve(message.state) : entry.reject(new Error(message.error));
  };
  model.on("msg:custom", receive);
  return {
    compute: (params) =>
      new Promise((resolve, reject) => {
        const id = next++;
        waiting.set(id, { resolve, reject });
        model.send({ kind: "compute", id, params });
      }),
    tell: (message) => model.send(message),
    listen: (listener) => others.add(listener),
    close: () => model.off("msg:custom", receive),
  };
}

export function keepKeys(model, root) {
  // JupyterLab listens on the document and would take the arrow keys of sliders for its own shortcuts
  const keep = (event) => root.contains(event.target) && event.stopPropagation();
  if (model.get("backend") === "kernel") window.addEventListener("keydown", keep, true);
  return () => window.removeEventListener("keydown", keep, true);
}
