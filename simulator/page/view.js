// Panels of timelines on one time axis: zoom, pan, hover, and what is shown.

const byId = (id) => document.getElementById(id);
let page = JSON.parse(byId("data").textContent), { styles } = page;
const GUTTER = 66;  // pixels left of the rows, for the names of stages
const MEMORY = 96;  // height of the memory curves
const MOST_CURVES = 16;
const view = { from: 0, to: 1, full: 1, most: 0, pinned: -1, frame: 0 };
const show = { path: false, messages: false, memory: true };
const panels = [];
let look = {};

const number = (value, digits = 6) => String(Number(value.toPrecision(digits)));
const timeText = (value) => [number(value), page.timeUnit].join(" ").trim();
const memoryText = (value) => [number(value / page.memory.size, 4), page.memory.name].join(" ").trim();

// Colours of the page's style, ready to be drawn with.
function readLook() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ink", "muted", "line", "ground", "idle", "accent", "hatch", "scheme"];
  look = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  look.ratio = window.devicePixelRatio || 1;
  look.font = getComputedStyle(document.body).fontFamily;
  look.hatch = stripes(look.hatch);
  look.again = stripes("rgba(255,255,255,.6)");
}

function stripes(colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const ctx = tile.getContext("2d");
  ctx.strokeStyle = colour;
  for (const shift of [-6, 0, 6]) {
    ctx.moveTo(shift, 6);
    ctx.lineTo(shift + 6, 0);
  }
  ctx.stroke();
  return ctx.createPattern(tile, "repeat");
}

// From violet over green to yellow, as in the pictures.
function stageColour(stage, count) {
  const share = count > 1 ? stage / (count - 1) : 0, light = look.scheme === "dark" ? 25 : 0;
  return `hsl(${275 - 215 * share} 60% ${28 + light + 22 * share}%)`;
}

function rowHeight({ stages }) {
  return stages <= 8 ? 24 : stages <= 16 ? 19 : stages <= 32 ? 15 : 11;
}

function heightOf({ timeline }) {
  const rows = 8 + timeline.stages * rowHeight(timeline);
  return rows + (show.memory && timeline.fixed ? MEMORY : 0);
}

function scaleOf({ timeline }, width) {
  const left = GUTTER, right = width - 8, { from, to } = view;
  const perUnit = (right - left) / (to - from), row = rowHeight(timeline);
  const beside = timeline.lines.length / timeline.stages - 1, strip = Math.round(row / 4);
  const bar = row - beside * strip - (row > 12 ? 4 : 2);
  return {
    left, right, from, to, perUnit, row, strip, bar, top: 4, font: Math.min(11, bar - 2),
    x: (time) => left + (time - from) * perUnit,
    time: (x) => from + (x - left) / perUnit,
  };
}

function fit(canvas, width, height) {
  canvas.width = Math.round(width * look.ratio);
  canvas.height = Math.round(height * look.ratio);
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.setTransform(look.ratio, 0, 0, look.ratio, 0, 0);
  return ctx;
}

function inPlot(ctx, scale, height, draw) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(scale.left, 0, scale.right - scale.left, height);
  ctx.clip();
  draw();
  ctx.restore();
}

function write(ctx, text, x, y, { size = 11, align = "right" } = {}) {
  ctx.font = `${size}px ${look.font}`;
  ctx.fillStyle = look.muted;
  ctx.textAlign = align;
  ctx.textBaseline = "middle";
  ctx.fillText(text, x, y);
}

function drawPanel(panel) {
  const { timeline } = panel, width = panel.box.clientWidth, height = heightOf(panel);
  const ctx = fit(panel.canvas, width, height), scale = (panel.scale = scaleOf(panel, width));
  let note = "";
  inPlot(ctx, scale, height, () => {
    if (drawBoxes(ctx, timeline, scale, look)) note = "bands: shares of time; zoom in for jobs";
    if (show.messages) {
      const count = drawArrows(ctx, timeline, scale, look);
      if (count > MOST_ARROWS) note = `${count} messages: zoom in to see them`;
    }
    if (show.path) drawPath(ctx, timeline, scale, look);
  });
  panel.note.textContent = note;
  for (let stage = 0; stage < timeline.stages; stage += Math.ceil(12 / scale.row))
    write(ctx, `stage ${stage}`, scale.left - 8, extent(timeline, scale, stage)[0] + scale.bar / 2, { size: Math.min(11, scale.row) });
  if (show.memory && timeline.fixed) drawMemory(ctx, timeline, scale, height);
  panel.frame.hidden = true;
  panel.stale = false;
}

// Curves of all stages, or of evenly spaced ones; the limit is dashed.
function drawMemory(ctx, timeline, scale, bottom) {
  const base = bottom - 14, roof = bottom - MEMORY + 10;
  const most = view.most * 1.06 || 1, height = (held) => base - (held / most) * (base - roof);
  ctx.fillStyle = look.line;
  ctx.fillRect(scale.left, base, scale.right - scale.left, 1);
  const peak = height(timeline.peak), texts = [["0", base], [memoryText(timeline.peak), peak], ["memory", (base + peak) / 2]];
  for (const [text, y] of texts) write(ctx, text, scale.left - 8, y, { size: 10 });
  inPlot(ctx, scale, bottom, () => {
    ctx.lineWidth = 1.4;
    for (let stage = 0; stage < timeline.stages; stage += Math.ceil(timeline.stages / MOST_CURVES)) {
      ctx.strokeStyle = stageColour(stage, timeline.stages);
      drawCurve(ctx, timeline, stage, scale, height);
    }
    if (timeline.limit === null || timeline.limit > most) return;
    ctx.setLineDash([5, 4]);
    ctx.strokeStyle = look.ink;
    ctx.lineWidth = 1;
    ctx.beginPath();
    ctx.moveTo(scale.left, height(timeline.limit));
    ctx.lineTo(scale.right, height(timeline.limit));
    ctx.stroke();
  });
}

function drawAxis() {
  const width = byId("axis").parentElement.clientWidth, ctx = fit(byId("axis"), width, 24);
  const { x, right, from, to } = scaleOf(panels[0], width);
  const rough = (to - from) / (right - GUTTER) * 90, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((one) => one * power >= rough) ?? 10);
  write(ctx, page.timeUnit ? `time, ${page.timeUnit}` : "time", GUTTER - 8, 8);
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to * (1 + 1e-9); k++) {
    ctx.fillRect(Math.round(x(k * step)), 18, 1, 6);
    write(ctx, number(k * step), Math.min(x(k * step), right - 8), 8, { align: "center" });
  }
}

function drawInSight(panel) {
  const { top, bottom } = panel.box.getBoundingClientRect();
  if (!panel.section.hidden && bottom > -200 && top < window.innerHeight + 200) drawPanel(panel);
}

function drawAll() {
  view.frame = 0;
  if (!panels.length) return;
  look.pinned = view.pinned;
  drawAxis();
  for (const panel of panels) {
    panel.stale = true;
    drawInSight(panel);
  }
}

function redraw() {
  view.frame ||= requestAnimationFrame(drawAll);
}

function setView(from, to) {
  const length = Math.min(Math.max(to - from, view.full * 1e-5), view.full);
  view.from = Math.min(Math.max(from, 0), view.full - length);
  view.to = view.from + length;
  redraw();
}

function zoom(factor, share = 0.5) {
  const length = (view.to - view.from) * factor, fixed = view.from + (view.to - view.from) * share;
  setView(fixed - length * share, fixed + length * (1 - share));
}

function pan(share) {
  const shift = (view.to - view.from) * share;
  setView(view.from + shift, view.to + shift);
}

// The panel's box at a point of its canvas, or -1.
function boxUnder({ scale, timeline }, x, y) {
  if (!scale || x < scale.left || x > scale.right) return -1;
  for (let line = 0; line < timeline.lines.length; line++) {
    const [top, height] = extent(timeline, scale, line);
    if (y >= top - 1 && y <= top + height) return boxAt(timeline, line, scale.time(x));
  }
  return -1;
}

function aboutBox({ timeline }, box) {
  const { start, end, lasts, chunk, chunk2, during, after, awaits } = timeline;
  const line = lineOf(timeline, box), sender = box + awaits[box];
  const rows = [["stage", line % timeline.stages]];
  const chunks = [chunk[box], chunk2[box]].filter((number) => number >= 0);
  for (const [name, numbers] of [["chunk", chunks], ["micro-batch", microbatchesOf(timeline, box)]])
    if (numbers.length) rows.push([name, numbers.join(" and ")]);
  rows.push(["start", timeText(start[box])], ["end", timeText(end[box])], ["lasts", timeText(lasts[box])]);
  if (timeline.fixed && line < timeline.stages)
    rows.push(["memory in it", memoryText(during[box])], ["memory after", memoryText(after[box])]);
  if (sender !== box)
    rows.push(["message of", `${nameOf(timeline, sender)}, stage ${lineOf(timeline, sender) % timeline.stages}, ended ${timeText(end[sender])}`]);
  const texts = rows.map(([name, value]) => `${name.padEnd(14)}${value}`);
  return [`${nameOf(timeline, box)}  ${styles[timeline.style[box]].what}`, ...texts].join("\n");
}

// Frames the box under the pointer, and tells about it.
function hover(panel, event) {
  const { scale, timeline, frame } = panel, tip = byId("tip");
  const { left, top } = panel.canvas.getBoundingClientRect();
  const box = boxUnder(panel, event.clientX - left, event.clientY - top);
  tip.hidden = frame.hidden = box < 0;
  if (box < 0) return box;
  const x = Math.max(scale.x(timeline.start[box]), scale.left), right = Math.min(scale.x(timeline.end[box]), scale.right);
  const [y, height] = extent(timeline, scale, lineOf(timeline, box));
  const place = { left: x, top: y, width: Math.max(right - x, 1), height };
  for (const [name, value] of Object.entries(place)) frame.style[name] = `${value}px`;
  tip.textContent = aboutBox(panel, box);
  const beside = (at, size, room) => `${Math.max(4, at + (at + 16 + size > room ? -size - 12 : 16))}px`;
  tip.style.left = beside(event.clientX, tip.offsetWidth, window.innerWidth);
  tip.style.top = beside(event.clientY, tip.offsetHeight, window.innerHeight);
  return box;
}

function clearHover() {
  byId("tip").hidden = true;
  for (const panel of panels) panel.frame.hidden = true;
}

function listen(panel) {
  const { box } = panel, on = (name, act) => box.addEventListener(name, act, { passive: false });
  let grip = null;
  on("pointerdown", (event) => {
    grip = { x: event.clientX, from: view.from, moved: false };
    if (event.isTrusted) box.setPointerCapture(event.pointerId);
  });
  on("pointermove", (event) => {
    if (!grip) return hover(panel, event);
    const shift = event.clientX - grip.x, from = grip.from - shift / panel.scale.perUnit;
    grip.moved ||= Math.abs(shift) > 3;
    if (!grip.moved) return;
    clearHover();
    setView(from, from + view.to - view.from);
  });
  on("pointerup", (event) => {
    if (grip && !grip.moved) pin(panel, hover(panel, event));
    grip = null;
  });
  on("pointercancel", () => (grip = null));
  on("pointerleave", clearHover);
  on("dblclick", () => setView(0, view.full));
  on("wheel", (event) => wheel(panel, event));
}

// A click lets one micro-batch stand out everywhere; another one ends that.
function pin(panel, box) {
  const chosen = box < 0 ? -1 : panel.timeline.microbatch[box];
  view.pinned = chosen === view.pinned ? -1 : chosen;
  redraw();
}

// With Ctrl (or two fingers apart) zooms; sideways, or with Shift, pans.
function wheel(panel, event) {
  const { deltaX, deltaY, shiftKey } = event, zooms = event.ctrlKey || event.metaKey;
  if (!zooms && !shiftKey && Math.abs(deltaX) <= Math.abs(deltaY)) return;
  event.preventDefault();
  clearHover();
  if (!zooms) return pan((shiftKey ? deltaY || deltaX : deltaX) / 1000);
  const { left } = panel.box.getBoundingClientRect(), { scale } = panel;
  const share = (event.clientX - left - scale.left) / (scale.right - scale.left);
  zoom(Math.exp(Math.max(-60, Math.min(60, deltaY)) * 0.006), Math.min(Math.max(share, 0), 1));
}

const KEYS = {
  "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
  0: () => setView(0, view.full), ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
};

function resize() {
  const whole = view.from === 0 && view.to === view.full;
  const shown = panels.filter((panel) => !panel.section.hidden).map((panel) => panel.timeline);
  view.full = Math.max(...shown.map((timeline) => timeline.length), 1e-12);
  view.most = Math.max(...shown.map((timeline) => timeline.peak ?? 0));
  setView(whole ? 0 : view.from, whole ? view.full : view.to);
}

function wire() {
  panels.forEach(listen);
  const buttons = (name, act) => document.querySelectorAll(`[data-${name}]`).forEach((button) =>
    button.addEventListener("click", () => act(button.dataset[name], button)));
  const toggled = (button) => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    return on;
  };
  buttons("zoom", (key) => KEYS[key]());
  document.querySelectorAll("[data-show]").forEach((button) => button.setAttribute("aria-pressed", show[button.dataset.show]));
  buttons("show", (name, button) => { show[name] = toggled(button); redraw(); });
  buttons("entry", (entry, button) => {
    const on = toggled(button);
    document.querySelectorAll(`[data-of="${entry}"]`).forEach((section) => (section.hidden = !on));
    resize();
  });
  byId("timelines").addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
}

function watch() {
  window.addEventListener("scroll", () => panels.filter((panel) => panel.stale).forEach(drawInSight), { passive: true });
  window.addEventListener("resize", () => { readLook(); redraw(); });
  for (const query of ["(prefers-color-scheme: dark)", "print"])
    matchMedia(query).addEventListener("change", () => { readLook(); drawAll(); });
}

// Draws the panels that are in the document; of a page that changes, again.
async function showPage(data) {
  page = data;
  ({ styles } = page);
  panels.length = 0;
  clearHover();
  readLook();
  for (const section of document.querySelectorAll(".panel")) {
    const find = (name) => section.querySelector(name);
    panels.push({
      section, timeline: await readTimeline(page.panels[section.dataset.panel]), box: find(".box"),
      canvas: find(".lanes"), frame: find(".frame"), note: find(".note"), stale: true,
    });
  }
  if (!panels.length) return;
  for (const panel of panels) panel.canvas.style.height = `${heightOf(panel)}px`;
  wire();
  resize();
  cancelAnimationFrame(view.frame);
  drawAll();
  performance.mark("zbpp drawn");
}

byId("copy")?.addEventListener("click", () => navigator.clipboard?.writeText(byId("command").textContent));
watch();
const ready = showPage(page);
