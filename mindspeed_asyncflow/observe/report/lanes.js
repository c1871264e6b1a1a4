// The lanes of all processes over time, on a canvas that can be zoomed and moved.
(function lanes() {
  const ROW = 22, TOP = 26, canvas = byId("laneCanvas"), box = byId("laneBox");
  const numbers = chooseRun(byId("laneRun"), byId("laneRuns"), (run) => run.lanes.bars.length, false);
  if (!numbers.length) return;
  byId("lanes").hidden = false;
  let run, lane, view, rows, whole, left, hits = [], drag = null, only = null;

  function choose() {
    run = RUNS[+byId("laneRun").value];
    lane = run.lanes;
    whole = [Math.min(0, lane.bars[0][2]), Math.max(...lane.bars.map((b) => b[2] + b[3])) || 1];
    view = [...lane.window];
    only = null;
    legendOf();
    sift();
  }

  function sift() {
    const words = byId("laneFilter").value.toLowerCase();
    rows = new Map();
    lane.rows.forEach((label, i) => label.toLowerCase().includes(words) && rows.set(i, rows.size));
    draw();
  }

  function legendOf() {
    const shown = lane.names.length > COLORS ? lane.names.slice(0, COLORS - 1) : lane.names;
    const keys = shown.map((name, i) => {
      const key = element("button", { type: "button", title: "only these" }, element("i", { class: `key c${i}` }), name);
      key.addEventListener("click", () => {
        only = only === i ? null : i;
        [...byId("laneLegend").children].forEach((other, j) => other.classList.toggle("off", only !== null && only !== j));
        draw();
      });
      return key;
    });
    if (shown.length < lane.names.length) keys.push(element("span", {}, element("i", { class: `key c${COLORS - 1}` }), `${lane.names.length - shown.length} others`));
    byId("laneLegend").replaceChildren(...keys);
  }

  const at = (pixel) => view[0] + ((pixel - left) / (canvas.clientWidth - left)) * (view[1] - view[0]);
  const colorOf = (name) => (lane.names.length > COLORS ? Math.min(name, COLORS - 1) : name);

  const above = (place) => TOP + ROW * place - box.scrollTop;

  // The canvas is as high as what is seen of it, and stays in place while the lanes scroll under the time axis.
  function draw() {
    const full = TOP + ROW * Math.max(1, rows.size) + 4, width = box.clientWidth, scale = devicePixelRatio || 1;
    const height = Math.min(full, Math.max(200, Math.round(innerHeight * 0.7)));
    box.style.maxHeight = height + "px";
    byId("laneRest").style.height = full - height + "px";
    left = Math.min(190, Math.max(118, width * 0.2));
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const style = getComputedStyle(document.documentElement), ink = (name) => style.getPropertyValue(name).trim();
    const colors = Array.from({ length: COLORS }, (_, i) => ink(`--c${i}`));
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px " + getComputedStyle(document.body).fontFamily;
    pen.textBaseline = "middle";
    const sx = (t) => left + ((t - view[0]) / (view[1] - view[0])) * (width - left);
    times(pen, width, height, sx, ink);
    pen.save();
    pen.beginPath();
    pen.rect(0, TOP, width, height - TOP);
    pen.clip();
    labels(pen, width, height, ink);
    bars(pen, sx, width, height, colors);
    pen.restore();
    if (drag) {
      pen.globalAlpha = 0.18;
      pen.fillStyle = ink("--c0");
      pen.fillRect(Math.min(drag.from, drag.to), TOP, Math.abs(drag.to - drag.from), height - TOP);
      pen.globalAlpha = 1;
    }
  }

  function line(pen, x0, y0, x1, y1) {
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  }

  function times(pen, width, height, sx, ink) {
    const unit = view[1] - view[0] > 1e6 ? 1e6 : 1e3;
    pen.strokeStyle = ink("--rule");
    pen.fillStyle = ink("--soft");
    pen.textAlign = "center";
    for (const v of ticks(view[0] / unit, view[1] / unit, width > 700 ? 8 : 4)) {
      const x = sx(v * unit);
      line(pen, x, TOP, x, height);
      if (x < width - 24 && x > left + 10) pen.fillText(`${+v.toPrecision(9)} ${unit === 1e6 ? "s" : "ms"}`, x, 8);
    }
    const marks = lane.marks.filter(([t]) => t >= view[0] && t <= view[1]);
    if (marks.length < 60) {
      pen.setLineDash([3, 3]);
      pen.strokeStyle = ink("--soft");
      let free = -Infinity;
      for (const [t, step] of marks) {
        line(pen, sx(t), TOP - 6, sx(t), height);
        if (sx(t) > free && sx(t) < width - 70) { pen.textAlign = "left"; pen.fillText(`step ${step} done`, sx(t) + 3, 20); free = sx(t) + 90; }
      }
      pen.setLineDash([]);
    }
  }

  function labels(pen, width, height, ink) {
    pen.textAlign = "right";
    pen.strokeStyle = ink("--rule");
    pen.fillStyle = ink("--ink");
    for (const [index, place] of rows) {
      const y = above(place);
      if (y < TOP - ROW || y > height) continue;
      let label = lane.rows[index];
      while (label.length > 4 && pen.measureText(label).width > left - 12) label = label.slice(0, -2) + "…";
      pen.fillText(label, left - 8, y + ROW / 2);
      line(pen, 0, y + ROW, width, y + ROW);
    }
  }

  function bars(pen, sx, width, height, colors) {
    hits = [];
    const last = new Map(); // row and depth -> pixel that is full: what is thinner than a pixel is drawn once
    for (const bar of lane.bars) {
      const [row, name, start, length, depth] = bar;
      if (start + length < view[0] || start > view[1] || !rows.has(row)) continue;
      const top = above(rows.get(row));
      if (top < TOP - ROW || top > height) continue;
      const x = Math.max(sx(start), left), to = Math.max(Math.min(sx(start + length), width), x + 1);
      const key = row * 8 + Math.min(depth, 7);
      if (to <= last.get(key)) continue;
      last.set(key, Math.ceil(to));
      const inset = 2 + 3 * Math.min(depth, 2), y = top + inset;
      pen.globalAlpha = only === null || only === name ? 0.9 : 0.12;
      pen.fillStyle = colors[colorOf(name)];
      pen.fillRect(x, y, to - x, ROW - 2 * inset);
      hits.push([x, to, y, y + ROW - 2 * inset, bar]);
    }
    pen.globalAlpha = 1;
    canvas.dataset.bars = hits.length;
  }

  function look(from, to) {
    const least = 20, size = Math.max(least, Math.min(to - from, whole[1] - whole[0]));
    const begin = Math.max(whole[0], Math.min(from, whole[1] - size));
    view = [begin, begin + size];
    draw();
  }
  const zoom = (factor, center = (view[0] + view[1]) / 2) => look(center - (center - view[0]) * factor, center + (view[1] - center) * factor);
  const move = (part) => look(view[0] + part * (view[1] - view[0]), view[1] + part * (view[1] - view[0]));
  const pixel = (event) => event.clientX - canvas.getBoundingClientRect().left;

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button || event.pointerType === "touch" || pixel(event) < left) return;
    canvas.setPointerCapture(event.pointerId);
    drag = { from: pixel(event), to: pixel(event) };
  });
  canvas.addEventListener("pointermove", (event) => {
    const x = pixel(event), y = event.clientY - canvas.getBoundingClientRect().top;
    if (drag) {
      drag.to = Math.max(left, Math.min(x, canvas.clientWidth));
      return draw();
    }
    const hit = hits.findLast(([x0, x1, y0, y1]) => x >= x0 - 1 && x <= x1 + 1 && y >= Math.max(y0, TOP) && y <= y1);
    if (!hit) return tell(event, "");
    const [row, name, start, length, , detail] = hit[4];
    tell(event, `${lane.names[name]}\n${lane.rows[row]}\n${show(length / 1e3)} ms from ${(start / 1e6).toFixed(3)} s\n${lane.details[detail]}`.trim());
  });
  canvas.addEventListener("pointerup", () => {
    const done = drag;
    drag = null;
    if (done && Math.abs(done.to - done.from) > 4) {
      look(...[at(done.from), at(done.to)].sort((a, b) => a - b));
    } else if (done) draw();
  });
  canvas.addEventListener("pointercancel", () => { drag = null; draw(); });
  canvas.addEventListener("pointerleave", () => tell(null, ""));
  box.addEventListener("scroll", draw);
  canvas.addEventListener("dblclick", () => look(...whole));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const turned = event.deltaY || event.deltaX;
    if (event.ctrlKey) zoom(turned > 0 ? 1.25 : 0.8, at(pixel(event)));
    else move(turned > 0 ? 0.15 : -0.15);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const done = { ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2) }[event.key];
    if (done) { event.preventDefault(); done(); }
  });
  byId("laneIn").addEventListener("click", () => zoom(0.5));
  byId("laneOut").addEventListener("click", () => zoom(2));
  byId("laneLeft").addEventListener("click", () => move(-0.5));
  byId("laneRight").addEventListener("click", () => move(0.5));
  byId("laneAll").addEventListener("click", () => look(...whole));
  byId("laneRun").addEventListener("change", choose);
  byId("laneFilter").addEventListener("input", sift);
  byId("laneStep").addEventListener("input", (event) => {
    const i = lane.marks.findIndex(([, step]) => step >= +event.target.value);
    if (event.target.value === "" || i < 0) return;
    look(i ? lane.marks[i - 1][0] : whole[0], Math.max(lane.marks[i][0], 1));
  });
  choose();
  redrawn(box, draw);
})();
