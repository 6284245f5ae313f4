// The planner in the browser: Python's own modules in Pyodide, off the page's thread.

import { loadPyodide } from "./pyodide/pyodide.mjs";

const beside = (name) => new URL(name, import.meta.url).href;

async function load() {
  const [python, archive] = await Promise.all([
    loadPyodide({ indexURL: beside("pyodide/") }),
    fetch(beside("zbpp.zip")).then((answer) => answer.arrayBuffer()),
  ]);
  python.unpackArchive(archive, "zip", { extractDir: "/planner" });
  python.runPython("import sys; sys.path.insert(0, '/planner')");
  return python.pyimport("zbpp.cli.playground.answers").answer;
}

const ready = load();

// A message is [number, question]; the reply [number, answer, error].
self.onmessage = async ({ data: [number, question] }) => {
  try {
    const answer = await ready;
    self.postMessage([number, answer(question), null]);
  } catch (error) {
    self.postMessage([number, null, String(error)]);
  }
};
