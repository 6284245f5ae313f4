// Pointer, wheel, keys and switches; the text about the job under the pointer.

const WORDS = {
  F: "forward", B: "input gradient", W: "weight gradient", BW: "both gradients",
  O: "optimizer step", V: "validation of the last step",
};

// The panel's job at a point of its canvas, or -1.
function jobUnder(panel, x, y) {
  const { scale, timeline } = panel;
  if (!scale || x < scale.left || x > scale.right) return -1;
  const stage = Math.floor((y - scale.top) / scale.lane);
  if (stage < 0 || stage >= timeline.jobs.length) return -1;
  if (scale.strip && y - laneTop(scale, stage) > scale.bar) return -1;
  return jobAt(timeline, stage, scale.time(x));
}

// The text about the collective at a point, or null.
function collectiveUnder({ scale, timeline }, x, y) {
  if (!scale || x < scale.left || x > scale.right) return null;
  const stage = Math.floor((y - scale.top) / scale.lane), time = scale.time(x);
  if (y - laneTop(scale, stage) <= scale.bar) return null;
  const found = timeline.collectives.find(
    ([own, , , start, end]) => own === stage && start <= time && time <= end,
  );
  if (!found) return null;
  const [, kind, chunk, start, end] = found, unit = page.timeUnit ? ` ${page.timeUnit}` : "";
  const times = { start: start - timeline.origin, end: end - timeline.origin, lasts: end - start };
  const rows = Object.entries(times).map(([name, value]) => [name, number(value) + unit]);
  return [`${chunk}${kind}`, [["stage", stage], ["chunk", chunk], ...rows]];
}

function rowsOf(panel, job) {
  const about = describe(panel.timeline, job), unit = page.timeUnit ? ` ${page.timeUnit}` : "";
  const rows = [["stage", about.stage]];
  if (about.chunk >= 0) rows.push(["chunk", about.chunk], ["micro-batch", about.microbatch]);
  rows.push(["start", number(about.start) + unit], ["end", number(about.end) + unit]);
  rows.push(["lasts", number(about.lasts) + unit]);
  if (about.sends) rows.push(["sends for", number(about.sends) + unit]);
  if (panel.timeline.fixed)
    rows.push(["memory in it", memoryText(about.during)], ["memory after", memoryText(about.after)]);
  if (about.source)
    rows.push(["message of", `${about.source}, stage ${about.sourceStage}, ended ${number(about.sourceEnd)}${unit}`]);
  return [`${about.name}  ${WORDS[about.kind]}`, rows];
}

function memoryRows(panel, time) {
  const { timeline } = panel, rows = [];
  const every = Math.ceil(timeline.jobs.length / MOST_CURVES);
  for (let stage = 0; stage < timeline.jobs.length; stage += every) {
    const job = jobAt(timeline, stage, time), next = firstAfter(timeline, stage, time);
    const held = job >= 0 ? timeline.during[job] : next > timeline.first[stage] ? timeline.after[next - 1] : timeline.fixed[stage];
    rows.push([`stage ${stage}`, memoryText(held)]);
  }
  return [`memory at ${number(time - timeline.origin)}`, rows];
}

function tell(event, [title, rows]) {
  const tip = byId("tip"), table = document.createElement("table");
  for (const [name, value] of rows) {
    const row = table.insertRow();
    row.appendChild(document.createElement("th")).textContent = name;
    row.insertCell().textContent = value;
  }
  const head = document.createElement("strong");
  head.textContent = title;
  tip.replaceChildren(head, table);
  tip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tip;
  const right = event.clientX + 16 + width > window.innerWidth;
  const low = event.clientY + 16 + height > window.innerHeight;
  tip.style.left = `${Math.max(4, event.clientX + (right ? -width - 12 : 16))}px`;
  tip.style.top = `${Math.max(4, event.clientY + (low ? -height - 12 : 16))}px`;
}

function hover(panel, event) {
  const { left, top } = panel.canvas.getBoundingClientRect();
  const x = event.clientX - left, y = event.clientY - top;
  const job = jobUnder(panel, x, y);
  outline(panel, job);
  const apart = job < 0 ? collectiveUnder(panel, x, y) : null;
  if (job >= 0) tell(event, rowsOf(panel, job));
  else if (apart) tell(event, apart);
  else if (show.memory && panel.timeline.fixed && y > panel.memoryTop && x > GUTTER)
    tell(event, memoryRows(panel, panel.scale.time(x)));
  else byId("tip").hidden = true;
  return job;
}

// A frame around the job under the pointer, on the canvas above the others.
function outline(panel, job) {
  const { scale, timeline, overlay } = panel;
  const ctx = fit(overlay, panel.box.clientWidth, heightOf(panel));
  if (job < 0) return;
  const x0 = Math.max(scale.x(timeline.start[job]), scale.left);
  const x1 = Math.min(scale.x(timeline.end[job]), scale.right);
  const y = laneTop(scale, stageOf(timeline, job));
  for (const [width, style] of [[4, look.ground], [2, look.ink]]) {
    ctx.lineWidth = width;
    ctx.strokeStyle = style;
    ctx.strokeRect(x0, y, Math.max(x1 - x0, 1), scale.bar);
  }
}

function clearHover() {
  byId("tip").hidden = true;
  for (const panel of panels) panel.overlay.width = 0;
}

function listen(panel) {
  const { box } = panel;
  let held = null;
  box.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, from: view.from, moved: false };
    if (event.isTrusted) box.setPointerCapture(event.pointerId);
  });
  box.addEventListener("pointermove", (event) => {
    if (!held) return hover(panel, event);
    const shift = event.clientX - held.x;
    held.moved ||= Math.abs(shift) > 3;
    if (!held.moved) return;
    clearHover();
    const length = view.to - view.from;
    const from = held.from - shift / panel.scale.perUnit;
    setView(from, from + length);
  });
  box.addEventListener("pointerup", (event) => {
    if (held && !held.moved) pin(panel, hover(panel, event));
    held = null;
  });
  box.addEventListener("pointercancel", () => (held = null));
  box.addEventListener("pointerleave", clearHover);
  box.addEventListener("dblclick", () => setView(0, view.full));
  box.addEventListener("wheel", (event) => wheel(panel, event), { passive: false });
}

// A click lets one micro-batch stand out everywhere; another one ends that.
function pin(panel, job) {
  const number = job < 0 ? -1 : panel.timeline.microbatch[job];
  view.pinned = number === view.pinned ? -1 : number;
  redraw();
}

// With Ctrl (or two fingers apart) zooms; sideways, or with Shift, pans.
function wheel(panel, event) {
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    const { left } = panel.box.getBoundingClientRect();
    const share = (event.clientX - left - GUTTER) / (panel.scale.right - panel.scale.left);
    zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006), Math.min(Math.max(share, 0), 1));
    clearHover();
  } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    event.preventDefault();
    pan(sideways / 1000);
    clearHover();
  }
}

const KEYS = {
  "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
  0: () => setView(0, view.full), ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
};

function resize() {
  const shown = panels.filter((one) => !one.section.hidden).map((one) => one.timeline);
  view.full = Math.max(...shown.map((one) => one.length), 1e-12);
  view.most = Math.max(...shown.map((one) => one.peak ?? 0));
  setView(view.from, view.to);
}

function toggle(button, change) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    change(on);
  });
}

function wire() {
  for (const panel of panels) listen(panel);
  document.querySelectorAll("[data-zoom]").forEach((button) =>
    button.addEventListener("click", () => KEYS[button.dataset.zoom]()));
  document.querySelectorAll("[data-show]").forEach((button) =>
    toggle(button, (on) => { show[button.dataset.show] = on; redraw(); }));
  document.querySelectorAll("[data-entry]").forEach((button) =>
    toggle(button, (on) => {
      document.querySelectorAll(`[data-of="${button.dataset.entry}"]`).forEach((one) => (one.hidden = !on));
      const whole = view.from === 0 && view.to === view.full;
      resize();
      if (whole) setView(0, view.full);
    }));
  byId("timelines").addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  window.addEventListener("scroll", () => panels.forEach((one) => one.stale && inSight(one) && drawPanel(one)), { passive: true });
  window.addEventListener("resize", () => { readLook(); redraw(); });
  for (const query of ["(prefers-color-scheme: dark)", "print"])
    matchMedia(query).addEventListener("change", () => { readLook(); drawAll(); });
  byId("copy")?.addEventListener("click", () => navigator.clipboard?.writeText(byId("command").textContent));
}

async function begin() {
  readLook();
  for (const section of document.querySelectorAll(".panel")) {
    const data = page.panels[section.dataset.panel];
    panels.push({
      section, timeline: await readTimeline(data), box: section.querySelector(".box"),
      canvas: section.querySelector(".lanes"), overlay: section.querySelector(".over"),
      note: section.querySelector(".note"), stale: true,
    });
    const panel = panels[panels.length - 1];
    panel.canvas.style.height = `${heightOf(panel)}px`;
  }
  if (!panels.length) return;
  wire();
  resize();
  setView(0, view.full);
  cancelAnimationFrame(view.frame);
  drawAll();
  performance.mark("zbpp drawn");
}

const ready = begin();
