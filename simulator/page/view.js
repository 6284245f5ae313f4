// Panels of timelines on one time axis: zoom, pan, hover, and what is shown.

const page = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const GUTTER = 66;  // pixels left of the lanes, for the names of stages
const MEMORY = 96;  // height of the memory curves
const MOST_CURVES = 16;
const view = { from: 0, to: 1, full: 1, most: 0, pinned: -1, frame: 0, hover: null };
const show = { path: false, messages: false, memory: true };
const panels = [];
let look = {};

function number(value, digits = 6) {
  return String(Number(value.toPrecision(digits)));
}

function memoryText(value) {
  return [number(value / page.memory.size, 4), page.memory.name].join(" ").trim();
}

// Colours of the page's style, and those of jobs, ready to be drawn with.
function readLook() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  const ratio = window.devicePixelRatio || 1;
  look = {
    ...page.palette, ratio, mostArrows: 4000, pinned: view.pinned,
    ink: of("--ink"), muted: of("--muted"), line: of("--line"), ground: of("--ground"),
    idle: of("--idle"), dark: of("--scheme") === "dark",
    font: getComputedStyle(document.body).fontFamily,
    packed: page.palette.tints.map((hex) => {
      const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
      return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
    }),
    layer: document.createElement("canvas"),
  };
  look.hatch = stripes(of("--hatch"));
  look.again = stripes("rgba(255,255,255,.6)");
}

function stripes(colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const ctx = tile.getContext("2d");
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1;
  for (const shift of [-6, 0, 6]) {
    ctx.moveTo(shift, 6);
    ctx.lineTo(shift + 6, 0);
  }
  ctx.stroke();
  return ctx.createPattern(tile, "repeat");
}

// Of violet, blue, green and yellow, the colour of a stage, as in the pictures.
function stageColour(stage, count) {
  const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
  const share = count > 1 ? stage / (count - 1) : 0;
  const at = (look.dark ? 0.25 + 0.75 * share : 0.88 * share) * (stops.length - 1);
  const i = Math.min(Math.floor(at), stops.length - 2);
  const mixed = stops[i].map((low, k) => Math.round(low + (stops[i + 1][k] - low) * (at - i)));
  return `rgb(${mixed.join()})`;
}

function laneHeight(count) {
  return count <= 8 ? 24 : count <= 16 ? 19 : count <= 32 ? 15 : 11;
}

// Times to pixels of one panel.
function scaleOf(panel, width) {
  const left = GUTTER, right = width - 8;
  const perUnit = (right - left) / (view.to - view.from);
  const origin = panel.timeline.origin, lane = laneHeight(panel.timeline.jobs.length);
  const strip = panel.timeline.collectives.length ? Math.round(lane / 4) : 0;
  return {
    left, right, perUnit, lane, strip, bar: lane - strip - (lane > 12 ? 4 : 2), top: 4,
    font: Math.min(11, lane - strip - 6),
    from: view.from + origin, to: view.to + origin,
    x: (time) => left + (time - origin - view.from) * perUnit,
    time: (x) => view.from + origin + (x - left) / perUnit,
  };
}

function heightOf(panel) {
  const lanesHeight = 8 + panel.timeline.jobs.length * laneHeight(panel.timeline.jobs.length);
  return lanesHeight + (show.memory && panel.timeline.fixed ? MEMORY : 0);
}

function fit(canvas, width, height) {
  const [w, h] = [width, height].map((size) => Math.round(size * look.ratio));
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const ctx = canvas.getContext("2d");
  ctx.setTransform(look.ratio, 0, 0, look.ratio, 0, 0);
  ctx.clearRect(0, 0, width, height);
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

function drawPanel(panel) {
  const { timeline, canvas } = panel;
  const width = panel.box.clientWidth, height = heightOf(panel);
  const ctx = fit(canvas, width, height), scale = (panel.scale = scaleOf(panel, width));
  let note = "";
  inPlot(ctx, scale, height, () => {
    if (lanes(ctx, timeline, scale, look)) note = "bands: shares of time; zoom in for jobs";
    if (show.messages) {
      const count = arrows(ctx, timeline, scale, look);
      if (count > look.mostArrows) note = `${count} messages: zoom in to see them`;
    }
    if (show.path) path(ctx, timeline, scale, look);
  });
  panel.note.textContent = note;
  names(ctx, timeline, scale);
  if (show.memory && timeline.fixed) drawMemory(ctx, panel, scale, height);
  panel.overlay.width = 0;
  panel.stale = false;
}

function names(ctx, timeline, scale) {
  const count = timeline.jobs.length;
  ctx.font = `${Math.min(11, scale.lane)}px ${look.font}`;
  ctx.fillStyle = look.muted;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  const every = Math.ceil(12 / scale.lane);
  for (let stage = 0; stage < count; stage += every)
    ctx.fillText(`stage ${stage}`, scale.left - 8, laneTop(scale, stage) + scale.bar / 2 + 0.5);
}

// Curves of all stages, or of evenly spaced ones; the limit is dashed.
function drawMemory(ctx, panel, scale, bottom) {
  const { timeline } = panel, count = timeline.jobs.length;
  const base = bottom - 14, roof = bottom - MEMORY + 10;
  const most = view.most * 1.06 || 1;
  const height = (held) => base - (held / most) * (base - roof);
  ctx.fillStyle = ctx.strokeStyle = look.line;
  ctx.lineWidth = 1;
  ctx.fillRect(scale.left, base, scale.right - scale.left, 1);
  ctx.font = `10px ${look.font}`;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  ctx.fillStyle = look.muted;
  ctx.fillText("0", scale.left - 8, base);
  ctx.fillText(memoryText(timeline.peak), scale.left - 8, height(timeline.peak));
  ctx.fillText("memory", scale.left - 8, (base + height(timeline.peak)) / 2);
  panel.memoryTop = roof;
  const every = Math.ceil(count / MOST_CURVES);
  inPlot(ctx, scale, bottom, () => {
    ctx.lineWidth = 1.4;
    for (let stage = 0; stage < count; stage += every) {
      ctx.strokeStyle = stageColour(stage, count);
      curve(ctx, timeline, stage, scale, height);
    }
    if (timeline.limit === null || timeline.limit > most) return;
    ctx.setLineDash([5, 4]);
    ctx.strokeStyle = look.ink;
    ctx.lineWidth = 1;
    ctx.beginPath();
    ctx.moveTo(scale.left, height(timeline.limit));
    ctx.lineTo(scale.right, height(timeline.limit));
    ctx.stroke();
    ctx.setLineDash([]);
  });
}

function drawAxis() {
  const canvas = byId("axis"), width = canvas.parentElement.clientWidth;
  const ctx = fit(canvas, width, 24);
  const left = GUTTER, right = width - 8, span = view.to - view.from;
  const rough = (span / (right - left)) * 90, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((one) => one * power >= rough) ?? 10);
  ctx.font = `11px ${look.font}`;
  ctx.fillStyle = look.muted;
  ctx.textBaseline = "top";
  ctx.textAlign = "right";
  ctx.fillText(page.timeUnit ? `time, ${page.timeUnit}` : "time", left - 8, 3);
  ctx.textAlign = "center";
  for (let k = Math.ceil(view.from / step - 1e-9); k * step <= view.to * (1 + 1e-9); k++) {
    const x = left + ((k * step - view.from) / span) * (right - left);
    ctx.fillRect(Math.round(x), 18, 1, 6);
    ctx.fillText(number(k * step), Math.min(x, right - 8), 3);
  }
}

function inSight(panel) {
  if (panel.section.hidden) return false;
  const { top, bottom } = panel.box.getBoundingClientRect();
  return bottom > -200 && top < window.innerHeight + 200;
}

function drawAll() {
  view.frame = 0;
  look.pinned = view.pinned;
  drawAxis();
  for (const panel of panels) {
    panel.stale = true;
    if (inSight(panel)) drawPanel(panel);
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
  const length = (view.to - view.from) * factor;
  const fixed = view.from + (view.to - view.from) * share;
  setView(fixed - length * share, fixed + length * (1 - share));
}

function pan(share) {
  const shift = (view.to - view.from) * share;
  setView(view.from + shift, view.to + shift);
}
