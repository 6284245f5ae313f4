// The playground: settings, which plans are asked for, the table, the chart.
// Timelines are drawn by the script of zbpp's pages, page.js.

const MODES = JSON.parse(byId("all-modes").textContent);
const SIZES = [  // name, label, least, most, step, at first
  ["stages", "stages", 1, 16, 1, 8],
  ["microbatches", "micro-batches", 1, 64, 1, 32],
  ["f", "time of F", 0.1, 4, 0.1, 1],
  ["b", "time of B", 0.1, 4, 0.1, 1],
  ["w", "time of W", 0.1, 4, 0.1, 1],
  ["comm", "link delay", 0, 2, 0.05, 0],
  ["limit", "memory limit", 0, 40, 0.5, 0],
];
const FIRST = ["1F1B", "ZBH1", "ZBV"];  // whose timelines are shown
let settings = {}, shown = new Set(), answers = new Map(), round = 0;

// Asking

// Sends a question to the planner; promises its answer.
async function ask(question) {
  const reply = await fetch("answer", { method: "POST", body: JSON.stringify(question) });
  if (!reply.ok) throw new Error(`the planner answers ${reply.status}`);
  return reply.json();
}

function say(text, isError = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("error", isError);
}

// Plans all modes, those with timelines first. A newer round takes the place of this one.
async function update() {
  const mine = ++round, asked = settings, isStale = () => mine !== round;
  writeHash();
  answers = new Map();
  document.querySelectorAll("#modes tr").forEach((row) => row.classList.add("stale"));
  const names = MODES.map(({ name }) => name);
  const inTurn = [...names.filter((name) => shown.has(name)), ...names.filter((name) => !shown.has(name))];
  try {
    for (const [number, mode] of inTurn.entries()) {
      const answer = await ask({ do: "plan", settings: asked, modes: [mode] });
      if (isStale()) return;
      performance.mark(`zbpp planned ${mode}`);
      answers.set(mode, answer);
      fillRow(mode, answer);
      await drawChart(asked, isStale);
      if (isStale()) return;
      say(number + 1 < inTurn.length ? `Planning ${inTurn[number + 1]} …` : "");
      if (number + 1 === shown.size) await drawShown(asked, isStale);
      if (isStale()) return;
    }
    tellCommands();
    performance.mark("zbpp settled");
  } catch (error) {
    if (!isStale()) say(error.message, true);
  }
}

// Bubble over memory, a point for each mode that has a plan.
async function drawChart(asked, isStale) {
  const modes = [...answers.keys()].filter((name) => !answers.get(name).reason);
  const { html } = await ask({ do: "chart", settings: asked, modes });
  if (!isStale()) byId("chart").innerHTML = html;
}

// Timelines of the modes that have a plan.
async function drawShown(asked, isStale) {
  const modes = MODES.map(({ name }) => name).filter((name) => shown.has(name) && !answers.get(name)?.reason);
  const { html, reason } = await ask({ do: "draw", settings: asked, modes });
  if (isStale()) return;
  if (reason) return say(reason, true);
  byId("timelines").innerHTML = html;
  showTimelines();
}

// Settings

const clean = (value, [, , least, most, step, first]) => {
  const number = value === null || value === "" ? NaN : Number(value);
  if (!Number.isFinite(number)) return first;
  return Number((Math.round(Math.min(Math.max(number, least), most) / step) * step).toFixed(4));
};

// The part of the address behind #: p=8&..., speeds=1,1,2&modes=1F1B,ZBV
function readHash() {
  const words = new URLSearchParams(location.hash.slice(1));
  settings = Object.fromEntries(SIZES.map((size) => [size[0], clean(words.get(size[0]), size)]));
  const speeds = (words.get("speeds") ?? "").split(",");
  settings.speeds = Array.from({ length: settings.stages }, (_, i) => clean(speeds[i] ?? null, SPEED));
  const names = MODES.map(({ name }) => name);
  shown = new Set((words.get("modes") ?? FIRST.join()).split(",").filter((name) => names.includes(name)));
}

const SPEED = ["", "", 0.25, 4, 0.05, 1];

function writeHash() {
  const words = SIZES.map(([name]) => `${name}=${settings[name]}`);
  if (settings.speeds.some((speed) => speed !== 1)) words.push(`speeds=${settings.speeds.join()}`);
  words.push(`modes=${[...shown].join()}`);
  history.replaceState(null, "", `#${words.join("&")}`);
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function buildForm() {
  const form = byId("settings");
  for (const size of SIZES) {
    const [name, label, min, max, step] = size;
    const range = element("input", { type: "range", id: name, min, max, step });
    const box = element("input", { type: "number", min, max, step, "aria-label": label });
    const change = (value) => {
      set({ [name]: clean(value, size) });
      fillForm();
    };
    range.addEventListener("input", () => change(range.value));
    box.addEventListener("change", () => change(box.value));
    form.append(element("label", { for: name }, label), range, box);
  }
  form.append(
    element("span", { class: "whole why" }, "memory limit 0: each mode takes its own"),
    element("span", { class: "whole" }, "times of each stage, from a quarter to four times"),
    element("div", { class: "whole", id: "speeds" }),
    element("div", { class: "whole buttons" }, button("equal stages", evenOut), button("copy link", copyLink), button("start over", startOver)),
  );
  form.addEventListener("submit", (event) => event.preventDefault());
}

function button(text, act) {
  const made = element("button", { type: "button" }, text);
  made.addEventListener("click", () => act(made));
  return made;
}

function evenOut() {
  set({ speeds: [] });
  fillForm();
}

async function copyLink(made) {
  await navigator.clipboard?.writeText(location.href);
  made.textContent = "copied";
  setTimeout(() => (made.textContent = "copy link"), 1500);
}

function startOver() {
  history.replaceState(null, "", location.pathname);
  beginAgain();
}

function fillForm() {
  SIZES.forEach(([name]) => {
    const range = byId(name);
    range.value = settings[name];
    range.nextElementSibling.value = settings[name];
  });
  const speeds = byId("speeds");
  speeds.replaceChildren(...settings.speeds.map((speed, stage) => {
    // halves and doubles are as far from 1
    const range = element("input", { type: "range", min: -2, max: 2, step: 0.05, "aria-label": `times of stage ${stage}` });
    range.value = Math.log2(speed);
    range.title = `stage ${stage}: ${speed} times`;
    range.addEventListener("input", () => {
      const chosen = clean(2 ** Number(range.value), SPEED);
      range.title = `stage ${stage}: ${chosen} times`;
      range.nextSibling.textContent = chosen;
      set({ speeds: settings.speeds.with(stage, chosen) });
    });
    return element("label", {}, range, element("span", {}, speed));
  }));
}

let timer = 0;
// Changes settings; sliders that move ask once they rest for a moment.
function set(changes) {
  settings = { ...settings, ...changes };
  settings.speeds = Array.from({ length: settings.stages }, (_, i) => settings.speeds[i] ?? 1);
  clearTimeout(timer);
  timer = setTimeout(update, 120);
}

// Table

const percent = (share) => `${(100 * share).toFixed(2)} %`;

function buildTable() {
  byId("modes").replaceChildren(...MODES.map(({ name, about }) => {
    const box = element("input", { type: "checkbox", "aria-label": `timeline of ${name}` });
    box.checked = shown.has(name);
    box.addEventListener("change", () => {
      if (box.checked) shown.add(name);
      else shown.delete(name);
      set({});
    });
    const save = button("plan.json", () => saveFile(name));
    const cells = ["", "", "", "", ""].map(() => element("td"));
    return element("tr", { id: `mode-${name}`, class: "stale" },
      element("th", { scope: "row", title: about }, name), element("td", {}, box), ...cells, element("td", {}, save));
  }));
}

function fillRow(mode, { reason, bubble, step, peak, gap, seconds, chosen }) {
  const row = byId(`mode-${mode}`), [, , ...cells] = row.children;
  row.classList.remove("stale");
  cells.at(-1).firstChild.disabled = Boolean(reason);
  const texts = reason ? ["", "", "", "", ""]
    : [percent(bubble), number(step), number(peak, 4), percent(Math.max(gap, 0)), `${Math.round(seconds * 1000)} ms`];
  texts.forEach((text, i) => (cells[i].textContent = text));
  cells[0].title = reason ?? "";
  if (reason) cells[0].textContent = "does not fit";
  row.firstChild.textContent = chosen && chosen !== mode ? `${mode}: ${chosen}` : mode;
  const least = Math.min(...[...answers.values()].map((one) => one.step ?? Infinity)) * (1 + 1e-9);
  for (const [name, one] of answers) byId(`mode-${name}`).classList.toggle("bold", one.step <= least);
}

// Files

function saveFile(mode) {
  const { file } = answers.get(mode) ?? {};
  if (!file) return;
  const link = element("a", { href: URL.createObjectURL(new Blob([file], { type: "application/json" })), download: "plan.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function tellCommands() {
  const one = [...answers.values()].find(({ costs }) => costs);
  const { stages, microbatches } = settings, mode = [...shown].find((name) => !answers.get(name)?.reason) ?? "auto";
  byId("repeat").textContent = one === undefined ? "" :
    `cat > costs.json <<'END'\n${one.costs}\nEND\nzbpp compare -p ${stages} -m ${microbatches} --costs costs.json -o report.html\n`
    + `zbpp plan ${mode} -p ${stages} -m ${microbatches} --costs costs.json -o plan.json`;
}

function beginAgain() {
  readHash();
  fillForm();
  buildTable();
  update();
}

buildForm();
window.addEventListener("hashchange", beginAgain);
beginAgain();
