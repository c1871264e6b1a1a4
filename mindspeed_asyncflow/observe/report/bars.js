// Histograms of lag and length, one colour for each run.
const MOST_BARS = 40;

// [[smallest value, answers of each run]] over bins of `width`.
function binsOf(kind, part) {
  const runs = RUNS.map((run) => run[kind]).map((bins) => ({ width: bins.width, values: bins.parts[part] || [] }));
  const largest = Math.max(...runs.flatMap((r) => r.values.map(([value]) => value)), 0);
  let width = Math.max(...runs.map((r) => r.width));
  while (largest / width >= MOST_BARS) width *= 2;
  const counts = new Map();
  runs.forEach(({ values }, run) => {
    for (const [value, count] of values) {
      const low = Math.floor(value / width) * width;
      if (!counts.has(low)) counts.set(low, RUNS.map(() => 0));
      counts.get(low)[run] += count;
    }
  });
  const lows = [...counts.keys()], rows = [];
  if (!lows.length) return { width, rows };
  for (let low = Math.min(...lows); low <= Math.max(...lows); low += width) rows.push([low, counts.get(low) || RUNS.map(() => 0)]);
  return { width, rows };
}

function drawBars(box, kind, part, label) {
  const { width: bin, rows } = binsOf(kind, part);
  if (!rows.length) return box.replaceChildren(element("p", { class: "hint" }, "Not recorded for this part."));
  const width = Math.max(260, box.clientWidth);
  const totals = RUNS.map((_, run) => rows.reduce((sum, [, counts]) => sum + counts[run], 0));
  const share = (count, run) => (totals[run] ? count / totals[run] : 0);
  const top = Math.max(...rows.flatMap(([, counts]) => counts.map(share))) * 1.12;
  const every = Math.ceil(rows.length / (width > 420 ? 12 : 7));
  const picture = element("svg:svg", { height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label });
  const frame = axes(picture, {
    width, height: HEIGHT, left: 54, bottom: 38, x: [0, rows.length], y: [0, top],
    xText: rows.flatMap(([low], i) => (i % every ? [] : [[i + 0.5, show(low)]])),
    yText: (v) => +(v * 100).toPrecision(3) + "%", label,
  });
  const slot = frame.sx(1) - frame.sx(0), bar = Math.min(60, (slot * 0.8) / RUNS.length);
  rows.forEach(([low, counts], i) => counts.forEach((count, run) => {
    if (!count) return;
    const y = frame.sy(share(count, run));
    const made = element("svg:rect", { class: `bar c${run % COLORS}`, x: frame.sx(i + 0.5) + (run - RUNS.length / 2) * bar, y, width: bar, height: Math.max(0.5, frame.base - y) });
    const range = bin === 1 ? show(low) : `${show(low)} to ${show(low + bin - 1)}`;
    made.addEventListener("pointermove", (event) => tell(event, `${RUNS.length > 1 ? RUNS[run].name + "\n" : ""}${range}: ${count.toLocaleString("en")} answers, ${(share(count, run) * 100).toPrecision(3)}%`));
    made.addEventListener("pointerleave", () => tell(null, ""));
    picture.append(made);
  }));
  const names = RUNS.length > 1 ? RUNS.map((run, i) => element("span", {}, element("i", { class: `key c${i % COLORS}` }), run.name)) : [];
  box.replaceChildren(picture, element("div", { class: "legend" }, ...names));
}

(function histograms() {
  const kinds = [["lags", "Lag", "versions, oldest token"], ["lengths", "Length", "tokens of an answer"]];
  const there = kinds.filter(([kind]) => RUNS.some((run) => Object.keys(run[kind].parts).length));
  if (!there.length) return;
  byId("histograms").hidden = false;
  const select = byId("part");
  select.append(...DATA.parts.filter((part) => RUNS.some((run) => kinds.some(([kind]) => run[kind].parts[part]))).map((part) => option(part)));
  for (const [kind, title, label] of there) {
    const box = element("div");
    byId("bars").append(element("figure", {}, element("figcaption", {}, title, " ", element("small", {}, "share of answers")), box));
    const draw = () => drawBars(box, kind, select.value, label);
    redrawn(box, draw);
    select.addEventListener("change", draw);
  }
})();
