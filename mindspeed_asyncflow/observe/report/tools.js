// What all parts of the page share.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const COLORS = 8;
const byId = (id) => document.getElementById(id);

// An element with attributes and children; children are elements or plain text.
function element(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function show(value) {
  if (value === null || value === undefined) return "—";
  const size = Math.abs(value);
  if (size >= 1e6) return +(value / 1e6).toPrecision(4) + "M";
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(+value.toPrecision(4));
}

// About `count` round numbers from low to high.
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, base = 10 ** Math.floor(Math.log10(raw));
  const step = base * [1, 2, 2.5, 5, 10].find((m) => base * m >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) found.push(i * step);
  return found;
}

function tell(event, text) {
  const tip = byId("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 6)) + "px";
  tip.style.top = (event.clientY + height + 24 > innerHeight ? event.clientY - height - 10 : event.clientY + 16) + "px";
}

function option(value, text = value) {
  return element("option", { value }, text);
}

// Fills a select with the runs for which `has` is true; hides `label` where there is no choice. Gives their numbers.
function chooseRun(select, label, has, everyone) {
  const numbers = RUNS.map((_, i) => i).filter((i) => has(RUNS[i]));
  if (everyone && numbers.length > 1) select.append(option("", "all"));
  for (const i of numbers) select.append(option(String(i), RUNS[i].name));
  label.hidden = numbers.length < 2;
  return numbers;
}

// Calls `draw` now, when the width of `box` changes and when light becomes dark.
function redrawn(box, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (box.clientWidth !== width) {
      width = box.clientWidth;
      requestAnimationFrame(draw);
    }
  }).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

// A grid with numbers beside it; gives the functions from values to pixels.
function axes(picture, { width, height, left, bottom, x, y, xText, yText, label }) {
  const right = width - 12, top = 10, base = height - bottom;
  const sx = (v) => left + ((v - x[0]) / (x[1] - x[0])) * (right - left);
  const sy = (v) => base - ((v - y[0]) / (y[1] - y[0])) * (base - top);
  for (const v of ticks(y[0], y[1], 5)) {
    picture.append(element("svg:line", { class: "axis", x1: left, x2: right, y1: sy(v), y2: sy(v) }));
    picture.append(element("svg:text", { x: left - 6, y: sy(v) + 4, "text-anchor": "end" }, yText(v)));
  }
  for (const [v, text] of xText) {
    picture.append(element("svg:text", { x: sx(v), y: base + 16, "text-anchor": "middle" }, text));
  }
  picture.append(element("svg:text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, label));
  return { sx, sy, left, right, top, base };
}
