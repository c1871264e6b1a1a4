// Curves of all runs: raw and as a moving mean, over steps or time, each run or the mean and range of its seeds.
const HEIGHT = 240;

function movingMean(values, size) {
  const means = [];
  for (let i = 0; i < values.length; i++) {
    const near = values.slice(Math.max(0, i - size + 1), i + 1).filter((v) => v !== null);
    means.push(values[i] === null ? null : near.reduce((a, b) => a + b, 0) / near.length);
  }
  return means;
}

// One line: {label, color, dash, x: [], y: [], range?: [[low, high]], faint?}
function linesOf(figure, how) {
  const [, labels, options] = figure;
  const names = Object.keys(labels), lines = [];
  const several = RUNS.length > 1;
  const groups = how.bySeed ? [...new Set(RUNS.map((r) => r.experiment))].map((e) => RUNS.filter((r) => r.experiment === e)) : RUNS.map((r) => [r]);
  const whose = (runs) => (several ? runs[0].name + (runs.length > 1 ? ` and ${runs.length - 1} more: ` : ": ") : "");
  groups.forEach((group, g) => {
    names.forEach((name, n) => {
      const has = group.filter((r) => r.values[name] && r.values[name].some((v) => v !== null));
      if (!has.length) return;
      const line = { label: whose(has) + labels[name], color: (several ? g : n) % COLORS, dash: several ? n : 0 };
      const smooth = (y) => (how.smooth > 1 ? movingMean(y, how.smooth) : y);
      if (has.length > 1) lines.push({ ...line, ...overSeeds(has.map((run) => ({ x: run.steps, y: smooth(run.values[name]) }))) });
      else lines.push(...ofOne(has[0], has[0].values[name], line, how));
    });
    const tested = options.heldout ? group.filter((run) => run.heldout.points.length) : [];
    if (tested.length) {
      const found = tested.map(({ heldout, ...run }) => ({
        x: heldout.points.map(([version]) => (how.axis === "time" ? timeOfVersion(run, version) : version)),
        y: heldout.points.map(([, mean]) => mean),
      }));
      const line = { label: whose(tested) + tested[0].heldout.label, color: (several ? g : 1) % COLORS, dash: several ? 1 : 0, dots: true };
      lines.push({ ...line, ...(tested.length > 1 ? overSeeds(found) : found[0]) });
    }
  });
  return lines;
}

// Version v is there when step v - 1 is done.
function timeOfVersion(run, version) {
  const index = run.steps.findIndex((s) => s >= version - 1);
  return run.times[version <= 0 ? 0 : index < 0 ? run.times.length - 1 : index] ?? 0;
}

function ofOne(run, y, line, how) {
  const x = how.axis === "time" ? run.times : run.steps;
  if (how.smooth <= 1) return [{ ...line, x, y }];
  return [{ ...line, x, y, faint: true }, { ...line, x, y: movingMean(y, how.smooth) }];
}

function overSeeds(found) {
  const at = new Map();
  for (const { x, y } of found) {
    x.forEach((step, i) => {
      if (y[i] === null) return;
      if (!at.has(step)) at.set(step, []);
      at.get(step).push(y[i]);
    });
  }
  const x = [...at.keys()].sort((a, b) => a - b);
  return {
    x,
    y: x.map((s) => at.get(s).reduce((a, b) => a + b, 0) / at.get(s).length),
    range: x.map((s) => [Math.min(...at.get(s)), Math.max(...at.get(s))]),
  };
}

function extent(lines, options) {
  let x0 = Infinity, x1 = -Infinity, y0 = options.free ? Infinity : 0, y1 = options.free ? -Infinity : options.ceiling || 0;
  for (const line of lines) {
    line.y.forEach((v, i) => {
      if (v === null) return;
      const [low, high] = line.range ? line.range[i] : [v, v];
      x0 = Math.min(x0, line.x[i]); x1 = Math.max(x1, line.x[i]);
      y0 = Math.min(y0, low); y1 = Math.max(y1, high);
    });
  }
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y0 === y1) y1 = y0 + (Math.abs(y0) || 1);
  const pad = 0.06 * (y1 - y0);
  return { x: [x0, x1], y: [y0 < 0 || options.free ? y0 - pad : y0, y1 === options.ceiling ? y1 : y1 + pad] };
}

function path(line, sx, sy) {
  let commands = "", up = true;
  line.y.forEach((v, i) => {
    if (v !== null) commands += `${up ? "M" : "L"}${sx(line.x[i]).toFixed(1)},${sy(v).toFixed(1)}`;
    up = v === null;
  });
  return commands;
}

function drawCurves(box, figure, how) {
  const options = figure[2], lines = linesOf(figure, how);
  const width = Math.max(260, box.clientWidth), { x, y } = extent(lines, options);
  const time = how.axis === "time", unit = time && x[1] > 300 ? 60 : 1;
  const xs = ticks(x[0] / unit, x[1] / unit, width > 420 ? 8 : 5).filter((v) => time || Number.isInteger(v));
  const picture = element("svg:svg", { height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": figure[0] });
  const frame = axes(picture, {
    width, height: HEIGHT, left: 54, bottom: 38, x, y,
    xText: xs.map((v) => [v * unit, show(v)]),
    yText: (v) => (options.percent ? Math.round(v * 100) + "%" : show(v)),
    label: time ? (unit === 60 ? "minutes" : "seconds") : "step",
  });
  for (const line of lines) {
    const { sx, sy } = frame, c = `c${line.color}`;
    if (line.range) {
      const there = line.x.map((v, i) => `${sx(v).toFixed(1)},${sy(line.range[i][1]).toFixed(1)}`);
      const back = line.x.map((v, i) => `${sx(v).toFixed(1)},${sy(line.range[i][0]).toFixed(1)}`).reverse();
      picture.append(element("svg:polygon", { class: `range ${c}`, points: [...there, ...back].join(" ") }));
    }
    const seen = line.y.filter((v) => v !== null).length;
    if (seen > 1) picture.append(element("svg:path", { class: `ln ${c} d${line.dash % 4}${line.faint ? " faint" : ""}`, d: path(line, sx, sy) }));
    if (line.dots || seen === 1) {
      line.y.forEach((v, i) => v !== null && picture.append(element("svg:circle", { class: `dot ${c}`, cx: sx(line.x[i]), cy: sy(v), r: 3.2 })));
    }
  }
  follow(picture, frame, lines, x, how, options);
  box.replaceChildren(picture, legend(lines.filter((line) => !line.faint)));
}

function legend(lines) {
  return element("div", { class: "legend" }, ...lines.map((line) =>
    element("span", {}, element("svg:svg", { viewBox: "0 0 22 10" }, element("svg:path", { class: `ln c${line.color} d${line.dash % 4}`, d: "M0,5L22,5" })), line.label)));
}

// The values nearest to the pointer.
function follow(picture, frame, lines, x, how, options) {
  const cursor = element("svg:line", { class: "cursor", y1: frame.top, y2: frame.base, visibility: "hidden" });
  picture.append(cursor);
  picture.addEventListener("pointermove", (event) => {
    const part = (event.clientX - picture.getBoundingClientRect().left - frame.left) / (frame.right - frame.left);
    const at = x[0] + Math.max(0, Math.min(1, part)) * (x[1] - x[0]);
    let nearest = null;
    for (const line of lines) line.x.forEach((v, i) => {
      if (line.y[i] !== null && (nearest === null || Math.abs(v - at) < Math.abs(nearest - at))) nearest = v;
    });
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x1", frame.sx(nearest));
    cursor.setAttribute("x2", frame.sx(nearest));
    const said = lines.filter((line) => !line.faint || lines.length === 1).flatMap((line) => {
      const i = line.x.indexOf(nearest);
      if (i < 0 || line.y[i] === null) return [];
      const range = line.range ? ` (${show(line.range[i][0])} to ${show(line.range[i][1])})` : "";
      return [`${line.label}: ${options.percent ? (line.y[i] * 100).toFixed(1) + "%" : show(line.y[i])}${range}`];
    });
    const where = how.axis === "time" ? `${show(nearest)} s` : `step ${nearest}`;
    tell(event, [where + (how.smooth > 1 ? `, mean of ${how.smooth}` : ""), ...said].join("\n"));
  });
  picture.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    tell(null, "");
  });
}

(function curves() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.values)))].filter((name) => RUNS.some((r) => r.values[name]?.some((v) => v !== null)));
  const figures = DATA.figures.filter(([, labels, options]) => Object.keys(labels).some((n) => names.includes(n)) || (options.heldout && RUNS.some((r) => r.heldout.points.length)));
  if (!figures.length && !names.length) return;
  byId("curves").hidden = false;
  const longest = Math.max(...RUNS.map((r) => r.steps.length));
  byId("smooth").value = longest > 20 ? 5 : 1;
  byId("seeds").hidden = new Set(RUNS.map((r) => r.experiment)).size === RUNS.length;
  const how = () => ({
    smooth: Math.max(1, Math.min(500, Math.floor(+byId("smooth").value) || 1)),
    axis: byId("axis").value,
    bySeed: byId("bySeed").checked && byId("axis").value === "step",
  });
  const draws = figures.map((figure) => {
    const unit = (DATA.metrics[Object.keys(figure[1])[0]] || ["1"])[0];
    const box = element("div");
    byId("figures").append(element("figure", {}, element("figcaption", {}, figure[0], " ", element("small", {}, unit === "1" ? "" : unit)), box));
    return [box, () => drawCurves(box, figure, how())];
  });
  if (names.length) {
    const select = element("select", { id: "anyMetric", "aria-label": "metric" }, ...names.sort().map((name) => option(name)));
    select.value = names.includes("actor/ratio_max") ? "actor/ratio_max" : names[0];
    const box = element("div"), words = element("small");
    byId("figures").append(element("figure", {}, element("figcaption", {}, "Any metric ", select), box, words));
    const draw = () => {
      drawCurves(box, [select.value, { [select.value]: select.value }, { free: true }], how());
      const [unit, definition] = DATA.metrics[select.value] || ["", ""];
      words.textContent = definition + (unit && unit !== "1" ? ` (${unit})` : "");
    };
    select.addEventListener("change", draw);
    draws.push([box, draw]);
  }
  for (const [box, draw] of draws) redrawn(box, draw);
  for (const id of ["smooth", "axis", "bySeed"]) byId(id).addEventListener("input", () => draws.forEach(([, draw]) => draw()));
})();
