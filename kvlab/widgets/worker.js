// The Python of the page: Pyodide in a module worker. Answers messages of kvlab.widgets.live and nothing else.
// in:  {type: "start", root}              root: URL of the book's _static/ folder
//      {type: "message", widget, message} as in kvlab/widgets/live.py
// out: {type: "progress", step, steps, text} · {type: "ready", version} · {type: "reply", reply} · {type: "failed", error}
//      {type: "told", told: {kind: "progress", id, done, of, text}} while a long answer is being worked out
let answer = null;

const steps = 3;
const progress = (step, text) => postMessage({ type: "progress", step, steps, text });

async function start(root) {
  progress(1, "fetching Python (13 MB)");
  const { loadPyodide } = await import(new URL("pyodide/pyodide.mjs", root));
  const pyodide = await loadPyodide({ indexURL: new URL("pyodide/", root).href });
  progress(2, "fetching kvlab");
  const response = await fetch(new URL("kvlab-py.zip", root));
  if (!response.ok) throw new Error(`kvlab-py.zip: HTTP ${response.status}`);
  pyodide.unpackArchive(await response.arrayBuffer(), "zip", { extractDir: "/kvlab-py" });
  progress(3, "importing kvlab");
  answer = pyodide.runPython(`
import sys
sys.path.insert(0, "/kvlab-py")
from kvlab.widgets.live import answer_json
answer_json
`);
  postMessage({ type: "ready", version: pyodide.runPython("sys.version.split()[0]") });
}

onmessage = async ({ data }) => {
  try {
    if (data.type === "start") await start(data.root);
    else {
      const { id } = data.message;
      const tell = (done, of, text) => { postMessage({ type: "told", told: { kind: "progress", id, done, of, text } }); };
      postMessage({ type: "reply", reply: JSON.parse(answer(data.widget, JSON.stringify(data.message), tell)) });
    }
  } catch (error) {
    postMessage({ type: "failed", error: String(error.message ?? error) });
  }
};
