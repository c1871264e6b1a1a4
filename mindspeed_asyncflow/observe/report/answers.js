// Answers with search.
(function answers() {
  const PAGE = 20;
  const all = RUNS.flatMap((run, number) => run.answers.map(([step, version, lag, score, prompt, answer, truth], order) =>
    ({ number, order, step, version, lag, score, prompt, answer, truth, text: `${prompt}\n${answer}\n${truth}`.toLowerCase() })));
  if (!all.length) return;
  byId("answers").hidden = false;
  chooseRun(byId("answerRun"), byId("answerRuns"), (run) => run.answers.length, true);
  const number = (value, absent) => (value === null ? absent : value);
  const orders = {
    new: (a, b) => b.version - a.version || b.order - a.order,
    old: (a, b) => a.version - b.version || a.order - b.order,
    best: (a, b) => number(b.score, -Infinity) - number(a.score, -Infinity) || b.order - a.order,
    worst: (a, b) => number(a.score, Infinity) - number(b.score, Infinity) || b.order - a.order,
    lag: (a, b) => number(b.lag, -1) - number(a.lag, -1) || b.order - a.order,
    long: (a, b) => b.answer.length - a.answer.length,
  };
  let found = [], shown = 0;

  // The text with the words in <mark>.
  function marked(text, words) {
    const low = text.toLowerCase(), parts = [];
    let from = 0;
    while (words.length) {
      let next = -1, size = 0;
      for (const word of words) {
        const i = low.indexOf(word, from);
        if (i >= 0 && (next < 0 || i < next)) [next, size] = [i, word.length];
      }
      if (next < 0) break;
      parts.push(text.slice(from, next), element("mark", {}, text.slice(next, next + size)));
      from = next + size;
    }
    return element("pre", {}, ...parts, text.slice(from));
  }

  function card(a, words) {
    const facts = [
      element("b", {}, `score ${show(a.score)}`),
      a.step === null ? "evaluation" : `step ${a.step}`,
      `version ${a.version}`,
      ...(a.lag === null ? [] : [`lag ${a.lag}`]),
      ...(RUNS.length > 1 ? [RUNS[a.number].name] : []),
    ].map((fact) => element("span", {}, fact));
    const texts = [["prompt", a.prompt], ["answer", a.answer], ["truth", a.truth]].filter(([, text]) => text);
    return element("article", { class: "answer" }, element("header", {}, ...facts),
      element("dl", {}, ...texts.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, marked(text, words))])));
  }

  const wordsOf = () => byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  function more() {
    const words = wordsOf();
    byId("answerList").append(...found.slice(shown, shown + PAGE).map((a) => card(a, words)));
    shown = Math.min(found.length, shown + PAGE);
    byId("answerMore").hidden = shown >= found.length;
    byId("answerCount").textContent = `${found.length} of ${all.length} answers` + (shown < found.length ? `, ${shown} shown` : "");
  }

  function sift() {
    const words = wordsOf(), kind = byId("answerKind").value, run = byId("answerRun").value;
    found = all.filter((a) => (!run || a.number === +run) && (!kind || (a.step === null) === (kind === "tested")) && words.every((word) => a.text.includes(word)));
    found.sort(orders[byId("answerOrder").value]);
    shown = 0;
    byId("answerList").replaceChildren();
    more();
  }
  let waiting;
  byId("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(sift, 80); });
  for (const id of ["answerRun", "answerKind", "answerOrder"]) byId(id).addEventListener("change", sift);
  byId("answerMore").addEventListener("click", more);
  sift();
})();
