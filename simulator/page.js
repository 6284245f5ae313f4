// Zoom, numbers, tooltips, and the same micro-batch highlighted, of all timelines of a page.
const byId = (id) => document.getElementById(id);
const number = (value, digits = 6) => String(Number(value.toPrecision(digits)));
const view = { from: 0, to: 1, full: 1 };
let panels = [];

// The boxes of a timeline, as its paths have them.
function readBoxes(lanes) {
  return [...lanes.querySelectorAll("[data-name]")].flatMap((path) => {
    const { name, ink } = path.dataset, numbers = path.dataset.numbers.split(",");
    let x = 0, y = 0;  // each box is as far from the one before it
    const rows = path.getAttribute("d").matchAll(/m(\S+) ([^h]+)h([^v]+)v([^h]+)/g);
    return Array.from(rows, ([, ...sizes], k) => {
      const [across, down, width, height] = sizes.map(Number);
      x += across;
      y += down;
      const microbatches = numbers[k].split(" "), text = ink ? numbers[k] || name : "";
      const full = microbatches.reduce((part, microbatch) => part.replace("*", microbatch), name);
      return { x, y, width, height, path, microbatches, text, name: full };
    });
  });
}

function pathOf(boxes) {
  return boxes.map(({ x, y, width, height }) => `M${x} ${y}h${width}v${height}h${-width}z`).join("");
}

// Shows the view of a panel: its boxes, the numbers in them, and the time axis.
function draw({ lanes, memory, over, boxes, stages }) {
  const { width, height } = lanes.getBoundingClientRect(), scale = width / (view.to - view.from);
  if (!width) return;
  for (const svg of [lanes, memory].filter(Boolean)) {
    const [, top, , rows] = svg.getAttribute("viewBox").split(" ");
    svg.setAttribute("viewBox", `${view.from} ${top} ${view.to - view.from} ${rows}`);
  }
  const row = height / stages, x = (time) => (time - view.from) * scale, texts = [];
  const write = (left, top, text, colour) => texts.push(`<text x="${left}" y="${top}" fill="${colour}">${text}</text>`);
  let outlined = false;
  for (const box of boxes) {
    const left = Math.max(x(box.x), 0), right = Math.min(x(box.x + box.width), width);
    outlined ||= box.text && box.width * scale > 6;
    if (!box.text || right - left < 6 * box.text.length + 2 || row < 11) continue;
    write((left + right) / 2, (box.y + box.height / 2) * row, box.text, box.path.dataset.ink);
  }
  lanes.classList.toggle("outlined", outlined);
  const rough = 90 / scale, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  for (let k = Math.ceil(view.from / step); k * step <= view.to * (1 + 1e-9); k++)
    write(Math.min(Math.max(x(k * step), 12), width - 12), over.clientHeight - 7, number(k * step), "var(--muted)");
  over.innerHTML = texts.join("");
}

function setView(from, to) {
  const length = Math.min(Math.max(to - from, view.full * 1e-4), view.full);
  view.from = Math.min(Math.max(from, 0), view.full - length);
  view.to = view.from + length;
  panels.forEach(draw);
}

function zoom(factor, share = 0.5) {
  const length = (view.to - view.from) * factor, fixed = view.from + (view.to - view.from) * share;
  setView(fixed - length * share, fixed + length * (1 - share));
}

// The box under the pointer: its figures in the tooltip, its micro-batch in full colour everywhere.
function hover({ lanes, boxes, stages }, event) {
  const { left, top, width, height } = lanes.getBoundingClientRect(), tip = byId("tip");
  const time = view.from + ((event.clientX - left) / width) * (view.to - view.from);
  const row = ((event.clientY - top) / height) * stages;
  const box = boxes.find((one) => one.x <= time && time < one.x + one.width && one.y <= row && row < one.y + one.height);
  highlight(box ? box.microbatches[0] : "");
  tip.hidden = !box;
  if (!box) return;
  const unit = document.body.dataset.unit ?? "", times = [box.x, box.x + box.width, box.width];
  const [start, end, lasts] = times.map((value) => `${number(value)} ${unit}`);
  tip.textContent = `${box.name}  ${box.path.dataset.about}\nstage  ${Math.floor(box.y)}\nstart  ${start}\nend    ${end}\nlasts  ${lasts}`;
  tip.style.left = `${Math.min(event.clientX + 16, window.innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 16, window.innerHeight - tip.offsetHeight - 8)}px`;
}

let highlighted = "";
function highlight(microbatch) {
  if (microbatch === highlighted) return;
  highlighted = microbatch;
  document.querySelectorAll(".same").forEach((path) => path.remove());
  for (const { lanes, boxes } of panels) {
    lanes.classList.toggle("dimmed", microbatch !== "");
    const same = Map.groupBy(boxes.filter(({ microbatches }) => microbatches.includes(microbatch)), ({ path }) => path);
    for (const [path, members] of microbatch === "" ? [] : same) {
      const copy = path.cloneNode();
      copy.setAttribute("class", "same");
      copy.setAttribute("d", pathOf(members));
      lanes.append(copy);
    }
  }
}

function listen(panel) {
  const { plot, lanes } = panel, on = (name, act) => plot.addEventListener(name, act, { passive: false });
  let grip = null;
  const leave = () => { byId("tip").hidden = true; highlight(""); };
  on("pointerdown", (event) => { grip = { x: event.clientX, from: view.from }; plot.setPointerCapture(event.pointerId); });
  on("pointerup", () => (grip = null));
  on("pointermove", (event) => {
    if (!grip) return hover(panel, event);
    const from = grip.from - ((event.clientX - grip.x) / lanes.clientWidth) * (view.to - view.from);
    setView(from, from + view.to - view.from);
  });
  on("pointerleave", leave);
  on("dblclick", () => setView(0, view.full));
  on("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const { left, width } = lanes.getBoundingClientRect();
    zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006), (event.clientX - left) / width);
  });
}

// Hands the jobs on the page to Perfetto, in a new tab, which needs a network.
function openTrace() {
  const events = panels.flatMap(({ boxes, name }, pid) => [
    { name: "process_name", ph: "M", pid, tid: 0, args: { name } },
    ...boxes.map((box) => ({ name: box.name, ph: "X", pid, tid: Math.floor(box.y * 2), ts: 1e3 * box.x, dur: 1e3 * box.width })),
  ]);
  const buffer = new TextEncoder().encode(JSON.stringify({ traceEvents: events })).buffer;
  const site = "https://ui.perfetto.dev", tab = window.open(site);
  const timer = setInterval(() => tab.postMessage("PING", site), 100);
  window.addEventListener("message", function send({ data }) {
    if (data !== "PONG") return;
    clearInterval(timer);
    window.removeEventListener("message", send);
    tab.postMessage({ perfetto: { buffer, title: document.title } }, site);
  });
}

// Reads the timelines in the document; of a page that changes, again.
function showTimelines() {
  panels = [...document.querySelectorAll(".panel")].map((panel) => {
    const find = (name) => panel.querySelector(name), lanes = find(".lanes");
    return {
      lanes, memory: find(".memory"), over: find(".over"), plot: find(".plot"), boxes: readBoxes(lanes),
      name: find("b").textContent, stages: Number(panel.dataset.stages), length: Number(panel.dataset.length),
    };
  });
  panels.forEach(listen);
  document.querySelectorAll(".panel").forEach((panel, k) => panel.addEventListener("toggle", () => draw(panels[k])));
  view.full = Math.max(...panels.map(({ length }) => length), 1e-12);
  setView(0, view.full);
}

const KEYS = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => setView(0, view.full) };
document.addEventListener("keydown", (event) => {
  if (!event.ctrlKey && !event.metaKey && event.target.tagName !== "INPUT") KEYS[event.key]?.();
});
document.addEventListener("click", ({ target }) => {
  if (target.id === "trace") openTrace();
  if (target.id === "copy") navigator.clipboard?.writeText(byId("command").textContent);
});
window.addEventListener("resize", () => panels.forEach(draw));

// Timelines are deflated in a page: text of this kind shrinks to a tenth.
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  byId("timelines").innerHTML = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
  showTimelines();
}
if (byId("packed")) unpack(byId("packed").textContent);
