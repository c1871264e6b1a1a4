// Tables of metrics and settings with search.
function matches(search, ...texts) {
  const text = texts.join("\n").toLowerCase();
  return byId(search).value.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

// A dotted name that may be broken behind its separators only.
function dotted(name) {
  return element("code", {}, ...name.split(/(?<=[./_])/).flatMap((part) => [part, element("wbr")]));
}

(function metrics() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.values)))];
  if (!names.length) return;
  byId("metrics").hidden = false;
  const known = Object.keys(DATA.metrics);
  const place = (name) => (known.indexOf(name) + 1 || known.length + 1);
  names.sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
  const ends = RUNS.length > 1 ? RUNS.map((run) => [run.name, run, "last"]) : [["first", RUNS[0], "first"], ["last", RUNS[0], "last"]];
  const value = (run, name, end) => {
    const there = (run.values[name] || []).filter((v) => v !== null);
    return show(end === "first" ? there[0] : there[there.length - 1]);
  };
  function draw() {
    const head = element("tr", {}, element("th", {}, "metric"), ...ends.map(([title]) => element("th", { class: "n" }, title)), element("th", {}, "unit"), element("th", {}, "definition"));
    const rows = names.flatMap((name) => {
      const [unit, definition] = DATA.metrics[name] || ["", ""];
      if (!matches("metricSearch", name, definition)) return [];
      return [element("tr", {}, element("td", {}, dotted(name)), ...ends.map(([, run, end]) => element("td", { class: "n" }, value(run, name, end))), element("td", {}, unit), element("td", { class: "text" }, definition))];
    });
    byId("metricTable").replaceChildren(element("table", {}, head, ...rows));
  }
  byId("metricSearch").addEventListener("input", draw);
  draw();
})();

(function settings() {
  if (!DATA.settings.length) return;
  byId("settings").hidden = false;
  const several = RUNS.length > 1, kind = byId("settingKind");
  if (!several) kind.querySelector("[value=differ]").remove();
  const differ = (row) => row.values.some((v) => v !== row.values[0]);
  const chosen = (row) => row.values.some((v) => v !== row.default);
  function draw() {
    const head = element("tr", {}, ...["key", ...RUNS.map((run) => (several ? run.name : "value")), "default", "meaning"].map((title) => element("th", {}, title)));
    const rows = DATA.settings.filter((row) => (kind.value === "differ" ? differ(row) : kind.value === "chosen" ? chosen(row) : true) && matches("settingSearch", row.key, ...row.values, row.meaning));
    byId("settingCount").textContent = `${rows.length} of ${DATA.settings.length} settings`;
    byId("settingTable").replaceChildren(element("table", {}, head, ...rows.map((row) => element("tr", {},
      element("td", {}, dotted(row.key)),
      ...row.values.map((v) => element("td", several && differ(row) ? { class: "differs" } : {}, element("code", {}, v))),
      element("td", {}, element("code", {}, row.default)),
      element("td", { class: "text" }, row.meaning)))));
  }
  kind.addEventListener("change", draw);
  byId("settingSearch").addEventListener("input", draw);
  draw();
})();

// Links to the parts that this page has, named by their titles.
for (const section of document.querySelectorAll("section[id]:not([hidden])")) {
  byId("parts").append(element("a", { href: "#" + section.id }, section.querySelector("h2").textContent));
}
