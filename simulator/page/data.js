// Columns of timelines to arrays, and lookups by time; columns.py tells the format.

const KINDS = ["F", "B", "W", "BW", "O", "V"];

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream();
  const whole = stream.pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(whole).arrayBuffer());
}

// Bytes sorted by their place within a number, back to numbers.
function gather(bytes, first, count, size) {
  const block = new Uint8Array(count * size);
  for (let place = 0; place < size; place++) {
    const plane = first + place * count;
    for (let i = 0; i < count; i++) block[i * size + place] = bytes[plane + i];
  }
  return block.buffer;
}

const pair = new Float64Array(1);
const words = new Uint32Array(pair.buffer);

// The double that differs from a guess in the given bits (two 32-bit words).
function corrected(guess, low, high) {
  pair[0] = guess;
  words[0] ^= low;
  words[1] ^= high;
  return pair[0];
}

function readColumns(bytes, count) {
  const columns = {};
  let first = 0;
  const next = (size) => {
    const buffer = gather(bytes, first, count, size);
    first += size * count;
    return buffer;
  };
  for (const name of ["start", "end", "during", "after"])
    columns[name] = new Uint32Array(next(8));
  for (const name of ["source", "microbatch", "chunk"])
    columns[name] = new Int32Array(next(4));
  columns.kind = new Uint8Array(next(1));
  return columns;
}

// A timeline: arrays with one entry a job, stage after stage; `first[stage]` is the
// number of the stage's first job.
async function readTimeline(data) {
  const first = [0];
  for (const jobs of data.jobs) first.push(first[first.length - 1] + jobs);
  const count = first[first.length - 1];
  const raw = readColumns(await inflate(data.columns), count);
  const timeline = { ...data, ...raw, first, count };
  for (const name of ["start", "end", "during", "after"])
    timeline[name] = new Float64Array(count);
  const nChunks = data.placement.length + 1;
  for (let stage = 0; stage < data.jobs.length; stage++) {
    const last = new Float64Array(nChunks * KINDS.length);
    let before = 0;
    for (let i = first[stage]; i < first[stage + 1]; i++) {
      const key = raw.kind[i] * nChunks + raw.chunk[i] + 1;
      const start = corrected(before, raw.start[2 * i], raw.start[2 * i + 1]);
      const guess = start + last[key];
      const end = corrected(guess, raw.end[2 * i], raw.end[2 * i + 1]);
      last[key] = end - start;
      before = end;
      timeline.start[i] = start;
      timeline.end[i] = end;
    }
  }
  for (const name of ["during", "after"])
    for (let i = 0, guess = 0; i < count; i++)
      guess = timeline[name][i] = corrected(guess, raw[name][2 * i], raw[name][2 * i + 1]);
  return measure(timeline);
}

// Origin, length and typical duration; the colour of each job.
function measure(timeline) {
  const { start, end, first, count } = timeline;
  let origin = Infinity, last = -Infinity;
  const lasting = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    origin = Math.min(origin, start[i]);
    last = Math.max(last, end[i]);
    lasting[i] = end[i] - start[i];
  }
  lasting.sort();
  for (const [, , , from, to] of timeline.collectives) {
    origin = Math.min(origin, from);
    last = Math.max(last, to);
  }
  timeline.origin = count ? origin : 0;
  timeline.length = count ? last - origin : 0;
  timeline.typical = count ? lasting[count >> 1] || timeline.length / count : 1;
  const leg = legs(timeline.placement);
  timeline.nLegs = Math.max(1, ...leg.map((one) => one + 1));
  timeline.tint = new Uint8Array(count);
  for (let i = 0; i < count; i++) {
    const chunk = timeline.chunk[i];
    timeline.tint[i] = timeline.kind[i] * 4 + Math.min(chunk < 0 ? 0 : leg[chunk], 3);
  }
  timeline.sends = new Float64Array(count);
  if (timeline.sending.length)
    for (let i = 0; i < count; i++) timeline.sends[i] = sendTime(timeline, i);
  timeline.recomputes = new Set(timeline.recomputing);
  timeline.spans = timeline.jobs.map((_, stage) => passSpan(timeline, stage));
  return timeline;
}

// Time at the end of a job in which its stage only sends.
function sendTime({ kind, chunk, sending }, job) {
  if (kind[job] === 2 || kind[job] > 3) return 0;
  return sending[kind[job] === 0 ? chunk[job] : chunk[job] - 1] ?? 0;
}

// Of each chunk, whether it is the first (0), second (1), ... of its stage.
function legs(placement) {
  const seen = {};
  return placement.map((stage) => (seen[stage] = (seen[stage] ?? -1) + 1));
}

// First start and last end of a stage's passes: what is idle between is its bubble.
function passSpan({ first, kind, start, end }, stage) {
  let from = Infinity, to = -Infinity;
  for (let i = first[stage]; i < first[stage + 1]; i++) {
    if (kind[i] > 3) continue;
    from = Math.min(from, start[i]);
    to = Math.max(to, end[i]);
  }
  return [from, to];
}

// The first job of a stage that ends after a time.
function firstAfter({ first, end }, stage, time) {
  let low = first[stage], high = first[stage + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (end[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The job that a stage does at a time, or -1.
function jobAt(timeline, stage, time) {
  const i = firstAfter(timeline, stage, time);
  return i < timeline.first[stage + 1] && timeline.start[i] <= time ? i : -1;
}

function stageOf({ first }, job) {
  let stage = 0;
  while (first[stage + 1] <= job) stage++;
  return stage;
}

function jobName({ kind, chunk, microbatch }, job) {
  const letter = KINDS[kind[job]];
  return kind[job] > 3 ? letter : `${chunk[job]}${letter}${microbatch[job]}`;
}

// Everything that is known of a job, in the unit of the page.
function describe(timeline, job) {
  const start = timeline.start[job] - timeline.origin;
  const end = timeline.end[job] - timeline.origin;
  const source = timeline.source[job] ? job + timeline.source[job] : -1;
  return {
    name: jobName(timeline, job),
    stage: stageOf(timeline, job),
    chunk: timeline.chunk[job],
    microbatch: timeline.microbatch[job],
    kind: KINDS[timeline.kind[job]],
    start,
    end,
    lasts: timeline.end[job] - timeline.start[job],
    sends: timeline.sends[job],
    during: timeline.during[job],
    after: timeline.after[job],
    source: source < 0 ? null : jobName(timeline, source),
    sourceStage: source < 0 ? null : stageOf(timeline, source),
    sourceEnd: source < 0 ? null : timeline.end[source] - timeline.origin,
  };
}
