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
      drawChart();
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

// Table and chart

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

// The next of 1, 2, 5, 10, ... at or above a number.
function roundStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((one) => one * power >= rough * (1 - 1e-9));
}

// Bubble over memory, one point a mode; names keep clear of one another and of points.
function drawChart() {
  const svg = byId("chart"), width = svg.clientWidth || 600, height = 250;
  const [left, top, right, bottom] = [52, 12, width - 76, height - 36];
  const points = [...answers].filter(([name, { reason }]) => !reason && name !== "auto").map(([name, { peak, bubble }]) => ({ name, peak, bubble }));
  const most = Math.max(...points.map(({ peak }) => peak), settings.limit, 1) * 1.05;
  const worst = Math.max(...points.map(({ bubble }) => bubble), 0.01) * 1.1;
  const x = (peak) => left + (peak / most) * (right - left), y = (bubble) => bottom - (bubble / worst) * (bottom - top);
  const parts = [`<line x1="${left}" y1="${bottom}" x2="${right}" y2="${bottom}"/><line x1="${left}" y1="${top}" x2="${left}" y2="${bottom}"/>`];
  const [down, across] = [roundStep(worst / 4), roundStep(most / 5)];
  for (let k = 0; k * down <= worst; k++)
    parts.push(`<text x="${left - 6}" y="${y(k * down) + 4}" text-anchor="end">${number(100 * k * down, 3)} %</text>`);
  for (let k = 0; k * across <= most; k++)
    parts.push(`<text x="${x(k * across)}" y="${bottom + 16}" text-anchor="middle">${number(k * across, 3)}</text>`);
  parts.push(`<text x="${(left + right) / 2}" y="${height - 4}" text-anchor="middle">peak memory</text>`, `<text x="${left + 6}" y="${top + 4}">bubble</text>`);
  if (settings.limit) parts.push(`<line class="limit" x1="${x(settings.limit)}" y1="${top}" x2="${x(settings.limit)}" y2="${bottom}"/>`);
  const taken = points.map(({ peak, bubble }) => [x(peak) - 4, y(bubble) + 4, 8]);  // left, bottom, width
  for (const { name, peak, bubble } of points.sort((a, b) => a.bubble - b.bubble || b.peak - a.peak)) {
    const at = x(peak) + 7, wide = 7.5 * name.length;
    let line = y(bubble) + 4;
    while (taken.some(([ox, oy, owide]) => Math.abs(oy - line) < 11 && at < ox + owide && ox < at + wide)) line -= 4;
    taken.push([at, line, wide]);
    parts.push(`<circle cx="${x(peak)}" cy="${y(bubble)}" r="4"/><text class="name" x="${at}" y="${line}">${name}</text>`);
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.innerHTML = parts.join("");
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
window.addEventListener("resize", drawChart);
beginAgain();
