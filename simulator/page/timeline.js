// One timeline: its boxes as arrays, lookups by time, and its picture on a canvas.
// Lines are numbered lane * stages + stage; lane 0 has the jobs of a stage.
// `styles` has the look of each style; `scale` maps times to pixels; `look` has colours.

const COLUMNS = {  // in the order of document.py, four bytes a box each
  wait: Float32Array, lasts: Float32Array, during: Float32Array, after: Float32Array,
  chunk: Int32Array, microbatch: Int32Array, chunk2: Int32Array, microbatch2: Int32Array,
  awaits: Int32Array, style: Int32Array,
};
const THIN = 5;  // pixels; where the typical box is narrower, bands take its place
const WINDOW = 12;  // typical boxes in a band's window: whole rounds of 2, 3, 4 or 6
const MOST_ARROWS = 4000;  // more would be a grey field

async function readTimeline(data) {
  const packed = Uint8Array.from(atob(data.columns), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = await new Response(stream).arrayBuffer();
  const first = [0];  // number of each line's first box
  for (const boxes of data.lines) first.push(first[first.length - 1] + boxes);
  const count = first[first.length - 1];
  const timeline = { ...data, first, start: new Float64Array(count), end: new Float64Array(count) };
  Object.entries(COLUMNS).forEach(([name, Type], k) => (timeline[name] = new Type(bytes, 4 * k * count, count)));
  for (let line = 0; line < data.lines.length; line++)
    for (let i = first[line], end = 0; i < first[line + 1]; i++) {
      timeline.start[i] = end + timeline.wait[i];
      end = timeline.end[i] = timeline.start[i] + timeline.lasts[i];
    }
  return timeline;
}

function lineOf({ first }, box) {
  let line = 0;
  while (first[line + 1] <= box) line++;
  return line;
}

// The first box of a line that ends after a time.
function firstAfter({ first, end }, line, time) {
  let low = first[line], high = first[line + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (end[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The box of a line at a time, or -1.
function boxAt(timeline, line, time) {
  const i = firstAfter(timeline, line, time);
  return i < timeline.first[line + 1] && timeline.start[i] <= time ? i : -1;
}

// As in schedule files: 3B7, or (0F4;3BW1)OVERLAP_F_B.
function nameOf({ chunk, microbatch, chunk2, microbatch2, style }, box) {
  const number = (value) => (value < 0 ? "" : value), { role, kinds } = styles[style[box]];
  const pass = (kind, c, m) => number(c[box]) + kind + number(m[box]);
  if (chunk2[box] < 0) return pass(role, chunk, microbatch);
  return `(${pass(kinds[0], chunk, microbatch)};${pass(kinds[1], chunk2, microbatch2)})${role}`;
}

// The micro-batches of a box: none, one, or the two of a pair.
function microbatchesOf({ microbatch, microbatch2 }, box) {
  return [microbatch[box], microbatch2[box]].filter((number) => number >= 0);
}

// Top and height of a line; lanes beside the jobs are thinner, and below them.
function extent({ stages }, scale, line) {
  const lane = Math.floor(line / stages), top = scale.top + (line % stages) * scale.row;
  if (lane === 0) return [top, scale.bar];
  return [top + scale.bar + 1 + (lane - 1) * scale.strip, scale.strip - 1];
}

// Draws idle spans, then boxes, or bands of them; returns whether these are bands.
function drawBoxes(ctx, timeline, scale, look) {
  const banded = timeline.typical > 0 && timeline.typical * scale.perUnit < THIN;
  timeline.spans.forEach((span, stage) => {
    if (!span) return;
    const [y, height] = extent(timeline, scale, stage);
    const x = Math.max(scale.x(span[0]), scale.left);
    for (ctx.fillStyle of [look.idle, look.hatch])
      ctx.fillRect(x, y, Math.min(scale.x(span[1]), scale.right) - x, height);
    if (banded) bands(ctx, timeline, scale, stage);
  });
  for (let line = 0; line < timeline.lines.length; line++)
    bars(ctx, timeline, scale, look, line, banded && line < timeline.stages);
  return banded;
}

function bars(ctx, timeline, scale, look, line, banded) {
  const { start, end, first, style } = timeline;
  const [y, height] = extent(timeline, scale, line), texts = [], instants = [];
  const digits = String(timeline.microbatches - 1).length;
  const roomy = (timeline.typical * scale.perUnit - 3) / (digits * 0.62);
  const font = roomy < 8 ? scale.font : Math.min(scale.font, roomy);
  const least = digits * font * 0.62 + 2.5;
  let i = firstAfter(timeline, line, scale.from);
  while (i > first[line] && end[i - 1] === scale.from) i--;  // what takes no time there
  for (; i < first[line + 1] && start[i] < scale.to; i++) {
    const { colour, hatched, work, once, text } = styles[style[i]];
    if ((banded && work) || (start[i] === end[i] && !once)) continue;
    const left = Math.max(scale.x(start[i]), scale.left - 2);
    const width = Math.min(scale.x(end[i]), scale.right + 2) - left;
    const numbers = microbatchesOf(timeline, i);
    const plain = look.pinned < 0 || numbers.includes(look.pinned);
    ctx.globalAlpha = plain ? 1 : 0.25;
    const air = width > 5 ? 1 : width > 2 ? 0.5 : 0;
    if (start[i] === end[i]) instants.push([left - 1, colour]);
    else
      for (ctx.fillStyle of hatched ? [colour, look.again] : [colour])
        ctx.fillRect(left, y, Math.max(width - air, 0.5), height);
    const more = numbers.length > 1 ? (digits + 1) * font * 0.62 : 0;
    if (plain && width >= least + more && height >= 9 && line < timeline.stages)
      texts.push([text ?? numbers.join(" "), left + width / 2, styles[style[i]].ink]);
  }
  ctx.globalAlpha = 1;
  for (const [x, colour] of instants) {
    ctx.fillStyle = colour;
    ctx.fillRect(x, y - 1, 2, height + 2);
  }
  ctx.font = `${font}px ${look.font}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  for (const [text, x, ink] of texts) {
    ctx.fillStyle = ink;
    ctx.fillText(text, x, y + height / 2 + 0.5);
  }
}

// The share of each style in a moving window, one above the other; the rest is idle.
function bands(ctx, timeline, scale, stage) {
  const [from, to] = timeline.spans[stage].map(scale.x), { start, end, first, style } = timeline;
  const half = Math.ceil(Math.max(timeline.typical * WINDOW * scale.perUnit, 6) / 2);
  const left = Math.floor(Math.max(from, scale.left)), right = Math.ceil(Math.min(to, scale.right));
  const low = left - half, width = right + half - low;
  const spent = {};  // by style: time, in pixels, before each pixel
  for (let i = firstAfter(timeline, stage, scale.time(low)); i < first[stage + 1]; i++) {
    const a = Math.max(scale.x(start[i]) - low, 0), b = Math.min(scale.x(end[i]) - low, width);
    if (a >= width) break;
    if (!styles[style[i]].work) continue;
    const sum = (spent[style[i]] ??= new Float64Array(width + 1));
    for (let k = Math.floor(a); k < b; k++) sum[k + 1] += Math.min(b, k + 1) - Math.max(a, k);
  }
  const [y, height] = extent(timeline, scale, stage);
  let upper = new Float64Array(Math.max(right - left, 0) + 1).fill(y);
  for (const [number, sum] of Object.entries(spent)) {
    for (let k = 0; k < width; k++) sum[k + 1] += sum[k];
    const lower = upper.map((top, k) => {
      const before = Math.max(k, Math.floor(from) - low), until = Math.min(k + 2 * half, Math.ceil(to) - low);
      return top + ((sum[until] - sum[before]) / Math.max(until - before, 1)) * height;
    });
    ctx.beginPath();
    upper.forEach((top, k) => ctx.lineTo(Math.min(Math.max(left + k, from), to), top));
    for (let k = lower.length - 1; k >= 0; k--) ctx.lineTo(Math.min(Math.max(left + k, from), to), lower[k]);
    ctx.fillStyle = styles[number].colour;
    ctx.fill();
    upper = lower;
  }
}

// A line on a wider one in the colour of the ground, so that it stands out.
function stroke(ctx, width, colour, ground) {
  for (const [wide, style] of [[width + 2, ground], [width, colour]]) {
    ctx.lineWidth = wide;
    ctx.strokeStyle = style;
    ctx.stroke();
  }
}

// Messages of the boxes in sight, unless they are too many; returns their number.
function drawArrows(ctx, timeline, scale, look) {
  const { start, end, first, awaits } = timeline, ends = [];
  const middle = (box) => {
    const [y, height] = extent(timeline, scale, lineOf(timeline, box));
    return y + height / 2;
  };
  for (let line = 0; line < timeline.lines.length; line++)
    for (let i = firstAfter(timeline, line, scale.from); i < first[line + 1]; i++) {
      const sender = i + awaits[i];
      if (start[i] > scale.to && end[sender] > scale.to) break;
      if (sender !== i) ends.push([sender, i]);
    }
  if (ends.length > MOST_ARROWS) return ends.length;
  ctx.beginPath();
  for (const [sender, reader] of ends) {
    ctx.moveTo(scale.x(end[sender]), middle(sender));
    ctx.lineTo(scale.x(start[reader]), middle(reader));
  }
  stroke(ctx, 1.25, look.accent, look.ground);
  return ends.length;
}

// The boxes that fixed the time, as one line through the rows, below their numbers.
function drawPath(ctx, timeline, scale, look) {
  ctx.beginPath();
  for (const box of timeline.path) {
    const [y, height] = extent(timeline, scale, lineOf(timeline, box));
    ctx.lineTo(scale.x(timeline.start[box]), y + height - 2.5);
    ctx.lineTo(scale.x(timeline.end[box]), y + height - 2.5);
  }
  ctx.lineJoin = "round";
  stroke(ctx, 2.5, look.ink, look.ground);
}

// The memory of one stage; within a pixel, from the most to the least.
function drawCurve(ctx, timeline, stage, scale, height) {
  const { start, end, during, after, first } = timeline;
  let i = firstAfter(timeline, stage, scale.from);
  let held = i > first[stage] ? after[i - 1] : timeline.fixed[stage];
  let pixel = -1, most = held, least = held;
  ctx.beginPath();
  ctx.moveTo(scale.left, height(held));
  const put = (x, value) => {
    if (Math.floor(x) !== pixel) {
      if (most !== least) for (const one of [most, least, held]) ctx.lineTo(pixel + 0.5, height(one));
      for (const one of [held, value]) ctx.lineTo(x, height(one));
      pixel = Math.floor(x);
      most = least = value;
    }
    most = Math.max(most, value);
    least = Math.min(least, value);
    held = value;
  };
  for (; i < first[stage + 1] && start[i] < scale.to; i++) {
    put(scale.x(Math.max(start[i], scale.from)), during[i]);
    if (i + 1 < first[stage + 1] && start[i + 1] <= end[i]) continue;  // no spikes
    put(Math.min(scale.x(end[i]), scale.right), after[i]);
  }
  const last = i < first[stage + 1] || held ? scale.right : scale.x(end[i - 1] ?? scale.from);
  put(last + 1, held);
  ctx.stroke();
}
