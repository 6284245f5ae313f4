// Pictures of a timeline on a canvas: `scale` maps times to pixels, `look` has colours.

const THIN = 5;  // pixels; narrower typical jobs are drawn as bands
const SEND = 24;  // tint of what a stage only sends; jobs have those below
const SMOOTH = 12;  // typical jobs in a band's window: whole rounds of 2, 3, 4 or 6

function lanes(ctx, timeline, scale, look) {
  const banded = timeline.typical * scale.perUnit < THIN;
  idle(ctx, timeline, scale, look);
  if (banded) bands(ctx, timeline, scale, look);
  else bars(ctx, timeline, scale, look);
  instants(ctx, timeline, scale, look);
  ctx.globalAlpha = 1;
  beside(ctx, timeline, scale, look);
  return banded;
}

// Collectives: a strip below the jobs of each stage.
function beside(ctx, timeline, scale, look) {
  for (const [stage, kind, , start, end] of timeline.collectives) {
    const x0 = Math.max(scale.x(start), scale.left - 2);
    const x1 = Math.min(scale.x(end), scale.right + 2);
    if (x1 <= x0) continue;
    ctx.fillStyle = look.beside[kind];
    const width = Math.max(x1 - x0 - (x1 - x0 > 4 ? 1 : 0), 0.5);
    ctx.fillRect(x0, laneTop(scale, stage) + scale.bar + 1, width, scale.strip - 1);
  }
}

function laneTop(scale, stage) {
  return scale.top + stage * scale.lane;
}

// Hatch each stage's span; its jobs are drawn over it.
function idle(ctx, timeline, scale, look) {
  timeline.spans.forEach(([from, to], stage) => {
    if (!(to > from)) return;
    const x0 = Math.max(scale.x(from), scale.left);
    const x1 = Math.min(scale.x(to), scale.right);
    if (x1 <= x0) return;
    const y = laneTop(scale, stage);
    for (const style of [look.idle, look.hatch]) {
      ctx.fillStyle = style;
      ctx.fillRect(x0, y, x1 - x0, scale.bar);
    }
  });
}

function bars(ctx, timeline, scale, look) {
  const { start, end, first, tint, microbatch, sends } = timeline;
  const texts = [];
  const digits = String(timeline.microbatches - 1).length;
  const roomy = (timeline.typical * scale.perUnit - 3) / (digits * 0.62);
  const font = roomy < 8 ? scale.font : Math.min(scale.font, roomy);
  const least = digits * font * 0.62 + 2.5;
  for (let stage = 0; stage < timeline.jobs.length; stage++) {
    const y = laneTop(scale, stage);
    for (let i = firstAfter(timeline, stage, scale.from); i < first[stage + 1]; i++) {
      if (start[i] >= scale.to) break;
      if (start[i] === end[i]) continue;
      const x0 = Math.max(scale.x(start[i]), scale.left - 2);
      const x1 = Math.min(scale.x(end[i]), scale.right + 2);
      const width = x1 - x0;
      const plain = look.pinned < 0 || look.pinned === microbatch[i];
      ctx.globalAlpha = plain ? 1 : 0.25;
      ctx.fillStyle = look.tints[tint[i]];
      ctx.fillRect(x0, y, Math.max(width - (width > 5 ? 1 : width > 2 ? 0.5 : 0), 0.5), scale.bar);
      if (timeline.recomputes.size && again(timeline, i)) {
        ctx.fillStyle = look.again;
        ctx.fillRect(x0, y, width - 1, scale.bar);
      }
      const x2 = Math.max(scale.x(end[i] - sends[i]), x0);
      if (x2 < x1) {
        ctx.fillStyle = look.tints[SEND];
        ctx.fillRect(x2, y, x1 - x2 - (width > 5 ? 1 : 0), scale.bar);
      }
      const room = Math.min(x1, x2) - x0;
      if (plain && room >= least && scale.bar >= 9) texts.push(i, x0 + room / 2, y);
    }
  }
  ctx.globalAlpha = 1;
  ctx.font = `${font}px ${look.font}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  for (let n = 0; n < texts.length; n += 3) {
    const job = texts[n];
    ctx.fillStyle = look.inks[tint[job]];
    const text = timeline.kind[job] > 3 ? KINDS[timeline.kind[job]] : microbatch[job];
    ctx.fillText(text, texts[n + 1], texts[n + 2] + scale.bar / 2 + 0.5);
  }
}

// True if a job computes layers again.
function again({ kind, chunk, recomputes }, job) {
  return (kind[job] === 1 || kind[job] === 3) && recomputes.has(chunk[job]);
}

// Where jobs are too thin: the share of each colour in a moving window, one above the
// other, as bands of a lane; what is left is idle.
function bands(ctx, timeline, scale, look) {
  const ratio = look.ratio;
  const width = Math.max(1, Math.round((scale.right - scale.left) * ratio));
  const height = Math.round(scale.bar * ratio);
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const used = [...new Set(timeline.tint)].sort((a, b) => a - b);
  if (timeline.sending.length) used.push(SEND);
  const place = new Int8Array(SEND + 1).fill(-1);
  used.forEach((tint, n) => (place[tint] = n));
  const colours = used.map((tint) => look.packed[tint]);
  const half = Math.max(timeline.typical * SMOOTH, 6 / scale.perUnit) / 2;
  look.layer.width = width;
  look.layer.height = height;
  const layer = look.layer.getContext("2d");
  for (let stage = 0; stage < timeline.jobs.length; stage++) {
    const [from, to] = timeline.spans[stage];
    pixels.fill(0);
    const upTo = [walker(timeline, stage, place, used.length), walker(timeline, stage, place, used.length)];
    for (let x = 0; x < width; x++) {
      const time = scale.from + (x + 0.5) / ratio / scale.perUnit;
      if (time < from || time > to) continue;
      const low = Math.max(time - half, from), high = Math.min(time + half, to);
      const before = upTo[0](low), until = upTo[1](high);
      let y = 0, share = 0;
      for (let n = 0; n < colours.length; n++) {
        share += (until[n] - before[n]) / (high - low);
        const bottom = Math.min(Math.round(share * height), height);
        for (; y < bottom; y++) pixels[y * width + x] = colours[n];
      }
    }
    layer.putImageData(image, 0, 0);
    ctx.drawImage(look.layer, scale.left, laneTop(scale, stage), width / ratio, height / ratio);
  }
}

// Time spent in each colour up to a time; asked for times that only grow.
function walker({ first, start, end, tint, sends }, stage, place, count) {
  const spent = new Float64Array(count), now = new Float64Array(count);
  const add = (to, i, time) => {
    const computed = Math.min(time, end[i] - sends[i]);
    to[place[tint[i]]] += computed - start[i];
    if (sends[i]) to[place[SEND]] += time - computed;
  };
  let i = first[stage];
  return (time) => {
    for (; i < first[stage + 1] && end[i] <= time; i++) add(spent, i, end[i]);
    now.set(spent);
    if (i < first[stage + 1] && start[i] < time) add(now, i, time);
    return now;
  };
}

// A V that takes no time is a line.
function instants(ctx, timeline, scale, look) {
  if (!timeline.kind.includes(5)) return;
  ctx.fillStyle = look.tints[20];
  for (let stage = 0; stage < timeline.jobs.length; stage++)
    for (let i = timeline.first[stage]; i < timeline.first[stage + 1]; i++) {
      const x = scale.x(timeline.start[i]);
      if (timeline.kind[i] === 5 && timeline.start[i] === timeline.end[i] && x >= scale.left)
        ctx.fillRect(x - 1, laneTop(scale, stage) - 1, 2, scale.bar + 2);
    }
}

// Messages of the jobs in sight; too many would be a grey field. Returns their number.
function arrows(ctx, timeline, scale, look) {
  const lines = [[], []];
  const middle = (stage) => laneTop(scale, stage) + scale.bar / 2;
  for (let stage = 0; stage < timeline.jobs.length; stage++)
    for (let i = firstAfter(timeline, stage, scale.from); i < timeline.first[stage + 1]; i++) {
      const source = i + timeline.source[i];
      if (timeline.start[i] > scale.to && timeline.end[source] > scale.to) break;
      if (source === i) continue;
      lines[timeline.kind[i] === 0 ? 0 : 1].push(
        scale.x(timeline.end[source]), middle(stageOf(timeline, source)),
        scale.x(timeline.start[i]), middle(stage),
      );
    }
  const count = (lines[0].length + lines[1].length) / 4;
  if (count > look.mostArrows) return count;
  lines.forEach((ends, n) => {
    for (const [width, style] of [[3, look.ground], [1.25, look.arrows[n]]]) {
      ctx.beginPath();
      for (let k = 0; k < ends.length; k += 4) {
        ctx.moveTo(ends[k], ends[k + 1]);
        ctx.lineTo(ends[k + 2], ends[k + 3]);
      }
      ctx.lineWidth = width;
      ctx.strokeStyle = style;
      ctx.stroke();
    }
  });
  return count;
}

// The jobs that fixed the time, as one line through the lanes.
function path(ctx, timeline, scale, look) {
  ctx.beginPath();
  let stage = -1;
  for (const job of timeline.path) {
    const own = stageOf(timeline, job);
    const y = laneTop(scale, own) + scale.bar - 2.5;  // numbers stay readable
    const x = scale.x(timeline.start[job]);
    if (stage < 0) ctx.moveTo(x, y);
    else ctx.lineTo(x, y);
    ctx.lineTo(scale.x(timeline.end[job]), y);
    stage = own;
  }
  ctx.lineJoin = "round";
  for (const [width, style] of [[5, look.ground], [2.5, look.ink]]) {
    ctx.lineWidth = width;
    ctx.strokeStyle = style;
    ctx.stroke();
  }
}

// One memory curve: of each pixel, what is held first, most, least and last.
function curve(ctx, timeline, stage, scale, height) {
  const { start, end, during, after, first } = timeline;
  const y = (held) => height(held);
  let i = firstAfter(timeline, stage, scale.from);
  let held = i > first[stage] ? after[i - 1] : timeline.fixed[stage];
  ctx.beginPath();
  ctx.moveTo(scale.left, y(held));
  let pixel = -1, most = held, least = held;
  const put = (x, value) => {
    if (Math.floor(x) !== pixel) {
      if (most !== least) {
        ctx.lineTo(pixel + 0.5, y(most));
        ctx.lineTo(pixel + 0.5, y(least));
        ctx.lineTo(pixel + 0.5, y(held));
      }
      ctx.lineTo(x, y(held));
      ctx.lineTo(x, y(value));
      pixel = Math.floor(x);
      most = least = value;
    } else {
      most = Math.max(most, value);
      least = Math.min(least, value);
    }
    held = value;
  };
  for (; i < first[stage + 1] && start[i] < scale.to; i++) {
    put(scale.x(Math.max(start[i], scale.from)), during[i]);
    if (i + 1 < first[stage + 1] && start[i + 1] <= end[i]) continue;  // no spikes
    put(Math.min(scale.x(end[i]), scale.right), after[i]);
  }
  if (most !== least)
    for (const value of [most, least, held]) ctx.lineTo(pixel + 0.5, y(value));
  ctx.lineTo(i < first[stage + 1] || held ? scale.right : scale.x(end[i - 1] ?? scale.from), y(held));
  ctx.stroke();
}
