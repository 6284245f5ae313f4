// Draws the timelines of a page: zoom, numbers, tooltips, and the same micro-batch highlighted.
const byId = (id) => document.getElementById(id);
const number = (value, digits = 6) => String(Number(value.toPrecision(digits)));
const LEFT = 64, RIGHT = 8, AXIS = 20, MEMORY = 84;  // pixels around a timeline, and below it
const rowHeight = (stages) => (stages <= 8 ? 24 : stages <= 16 ? 19 : stages <= 32 ? 15 : 11);
const view = { from: 0, to: 1, full: 1 };
let panels = [], highlighted = "";

// The boxes of a timeline; each begins so long after the one before it on its line has ended.
function boxesOf({ lines, styles, lanes }, unit) {
  return lines.flatMap((line) => {
    let end = 0;
    const [top, height] = lanes[line.lane];
    return line.names.map((name, k) => {
      const start = end + line.gaps[k], microbatches = name.match(/(?<=[A-Z])\d+/g) ?? [];
      end = start + line.times[k];
      const text = line.lane ? "" : microbatches.join(" ") || name;
      return {
        name, text, microbatches, start: start * unit, end: end * unit, stage: line.stage, lane: line.lane,
        y: line.stage + top, height, style: styles[line.styles[k]],
      };
    });
  });
}

// Draws the part of a timeline that is in view: idle time, boxes with their numbers, memory, and the axis.
function draw({ svg, data, boxes }) {
  const { stages, lanes, spans, memory } = data, inner = svg.clientWidth - LEFT - RIGHT;
  if (inner <= 0) return;
  const row = rowHeight(stages), bottom = stages * row + (memory ? MEMORY + 12 : 0);
  svg.setAttribute("height", bottom + AXIS);
  const scale = inner / (view.to - view.from), x = (time) => Math.max(0, Math.min(inner, (time - view.from) * scale));
  const shapes = [], labels = [], rectangle = (left, top, width, height) => `M${left.toFixed(2)} ${top.toFixed(2)}h${width.toFixed(2)}v${height.toFixed(2)}h${(-width).toFixed(2)}z`;
  const line = (colour, d, more = "") => shapes.push(`<path fill="none" stroke="${colour}" d="${d}" ${more}/>`);
  const write = (left, top, text, colour = "var(--muted)") => shapes.push(`<text x="${left}" y="${top}" fill="${colour}">${text}</text>`);
  const label = (top, text) => labels.push(`<text class="label" x="${LEFT - 6}" y="${top}" fill="var(--muted)">${text}</text>`);
  const ground = spans.map(([stage, start, end]) => rectangle(x(start), (stage + lanes[0][0]) * row, x(end) - x(start), lanes[0][1] * row));
  shapes.push(`<path fill="var(--idle)" d="${ground.join("")}"/>`);
  const paths = new Map(), texts = [];
  let outline = "";
  for (const box of boxes) {
    if (box.end < view.from || box.start > view.to) continue;
    const left = x(box.start), width = Math.max(x(box.end) - left, box.style.least), dim = highlighted && !box.microbatches.includes(highlighted);
    const key = `fill="${box.style.colour}" class="${dim ? "dim" : ""}"`;
    if (!paths.has(key)) paths.set(key, []);
    paths.get(key).push(rectangle(left, box.y * row, width, box.height * row));
    if (box.text && width > 6) outline = 'stroke="var(--ground)"';
    if (box.text && width > 6 * box.text.length + 2 && row >= 11) texts.push([left + width / 2, (box.y + box.height / 2) * row, box.text, box.style.ink]);
  }
  for (const [key, rectangles] of paths) shapes.push(`<path ${key} ${outline} d="${rectangles.join("")}"/>`);
  for (const text of texts) write(...text);
  for (let stage = 0; stage < stages; stage++) label((stage + 0.5) * row, `stage ${stage}`);
  if (memory) {
    const y = (amount) => bottom - (amount / memory.top) * MEMORY;
    shapes.push(`<path fill="var(--idle)" d="${rectangle(0, y(memory.base), inner, bottom - y(memory.base))}"/>`);
    for (const [colour, points] of memory.curves) line(colour, "M" + points.map(([time, amount]) => `${((time - view.from) * scale).toFixed(2)} ${y(amount).toFixed(2)}`).join("L"), 'stroke-width="1.4"');
    if (memory.limit !== null) line("var(--ink)", `M0 ${y(memory.limit)}h${inner}`, 'stroke-dasharray="5 4"');
    line("var(--line)", `M0 ${bottom}h${inner}`);
    for (const [amount, text] of memory.labels) label(y(amount), text);
  }
  const rough = 90 / scale, power = 10 ** Math.floor(Math.log10(rough)), step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  for (let k = Math.ceil(view.from / step); k * step <= view.to * (1 + 1e-9); k++)
    write(Math.min(Math.max(x(k * step), 8), inner - 8), bottom + AXIS / 2 + 2, number(k * step));
  svg.innerHTML = `${labels.join("")}<svg x="${LEFT}" width="${inner}">${shapes.join("")}</svg>`;
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

const perPixel = (svg) => (view.to - view.from) / (svg.clientWidth - LEFT - RIGHT);

// The box under the pointer: its figures in the tooltip, its micro-batch in full colour everywhere.
function hover({ svg, boxes, data }, event) {
  const { left, top } = svg.getBoundingClientRect(), tip = byId("tip");
  const time = view.from + (event.clientX - left - LEFT) * perPixel(svg);
  const y = (event.clientY - top) / rowHeight(data.stages);
  const box = boxes.find((one) => one.start <= time && time < one.end && one.y <= y && y < one.y + one.height);
  highlight(box?.microbatches[0] ?? "");
  tip.hidden = !box;
  if (!box) return;
  const unit = document.body.dataset.unit ?? "", [start, end, lasts] = [box.start, box.end, box.end - box.start].map((value) => `${number(value)} ${unit}`);
  tip.textContent = `${box.name}  ${box.style.about}\nstage  ${box.stage}\nstart  ${start}\nend    ${end}\nlasts  ${lasts}`;
  tip.style.left = `${Math.min(event.clientX + 16, window.innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 16, window.innerHeight - tip.offsetHeight - 8)}px`;
}

function highlight(microbatch) {
  if (microbatch === highlighted) return;
  highlighted = microbatch;
  panels.forEach(draw);
}

function listen(panel) {
  const { svg } = panel, on = (name, act) => svg.addEventListener(name, act, { passive: false });
  let grip = null;
  on("pointerdown", (event) => { grip = { x: event.clientX, from: view.from }; svg.setPointerCapture(event.pointerId); });
  on("pointerup", () => (grip = null));
  on("pointermove", (event) => {
    if (!grip) return hover(panel, event);
    const from = grip.from - (event.clientX - grip.x) * perPixel(svg);
    setView(from, from + view.to - view.from);
  });
  on("pointerleave", () => { byId("tip").hidden = true; highlight(""); });
  on("dblclick", () => setView(0, view.full));
  on("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const share = (event.clientX - svg.getBoundingClientRect().left - LEFT) / (svg.clientWidth - LEFT - RIGHT);
    zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006), share);
  });
}

// Hands the jobs on the page to Perfetto, in a new tab, which needs a network.
function openTrace() {
  const events = panels.flatMap(({ boxes, data }, pid) => [
    { name: "process_name", ph: "M", pid, tid: 0, args: { name: data.name } },
    ...boxes.map(({ name, stage, lane, start, end }) => ({ name, ph: "X", pid, tid: 2 * stage + lane, ts: 1e3 * start, dur: 1e3 * (end - start) })),
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

// Reads the timelines in the document, which are deflated, and draws them; of a page that changes, again.
async function showTimelines() {
  if (!byId("packed")) return;
  const bytes = Uint8Array.from(atob(byId("packed").textContent), (letter) => letter.charCodeAt(0));
  const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
  const all = JSON.parse(text);
  view.full = all.length;
  panels = all.panels.map((data, k) => {
    const details = document.createElement("details"), summary = document.createElement("summary"), name = document.createElement("b");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), panel = { svg, data, boxes: boxesOf(data, all.unit) };
    name.textContent = data.name;
    summary.append(name, ` ${data.facts}`);
    details.append(summary, svg);
    details.open = k < 4;
    details.addEventListener("toggle", () => draw(panel));
    byId("timelines").append(details);
    listen(panel);
    return panel;
  });
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
