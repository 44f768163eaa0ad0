// Tokens by chunks: those near the window are loaded and drawn, and the others are empty boxes of their height.
(() => {
  // The log probability at which the colour is full.
  const FULL = -5;
  const shown = (value) => value == null ? "–" : String(+value.toPrecision(4));

  function setUp(box) {
    const size = +box.dataset.chunk, length = +box.dataset.length;
    const told = document.querySelector(".told");
    const chunks = [];
    let here = null;

    const colour = (logprob) => {
      const level = Math.min(4, Math.ceil((logprob ?? 0) / FULL * 4 - 0.05));
      return level < 1 ? "" : `warm${level}`;
    };

    function draw(chunk) {
      const { data } = chunk, fragment = document.createDocumentFragment();
      data.ids.forEach((_, at) => {
        const place = data.from + at, token = document.createElement("i");
        const span = data.spans.find(([start, stop]) => start <= place && place < stop);
        token.textContent = data.texts[at].replace(/\n/g, "↵\n") || "·";
        token.dataset.at = place;
        token.className = [span && "on", span?.[0] === place && "start", span && span[1] - 1 === place && "end", colour(data.logprobs[at])].filter(Boolean).join(" ");
        fragment.append(token);
      });
      chunk.element.replaceChildren(fragment);
      chunk.element.style.minHeight = "";
    }

    async function load(chunk) {
      chunk.wanted = true;
      if (!chunk.data) {
        const answer = await fetch(`${box.dataset.url}&from=${chunk.number * size}`);
        if (!answer.ok) { chunk.element.textContent = `These tokens did not come (${answer.status}).`; return; }
        chunk.data = await answer.json();
      }
      if (chunk.wanted && !chunk.element.firstChild) draw(chunk);
      if (location.hash === `#t${chunk.number * size}` || chunk.seek != null) select(chunk.seek ?? chunk.number * size);
    }

    function drop(chunk) {
      chunk.wanted = false;
      if (!chunk.element.firstChild) return;
      chunk.element.style.minHeight = `${chunk.element.offsetHeight}px`;
      chunk.element.replaceChildren();
    }

    function tell(place) {
      const chunk = chunks[Math.floor(place / size)], { data } = chunk, at = place - data.from;
      const rows = [["token", JSON.stringify(data.texts[at])], ["id", data.ids[at]], ["place", place]];
      const span = data.spans.find(([start, stop]) => start <= place && place < stop);
      if (span) rows.push(["answer", `call ${span[2]}, v${span[4]}`]);
      else rows.push(["", "not sampled"]);
      const logprob = data.logprobs[at];
      if (logprob != null) rows.push(["probability", shown(Math.exp(logprob))], ["log probability", shown(logprob)]);
      for (const [text, value] of data.top[place] || []) rows.push([JSON.stringify(text), shown(Math.exp(value))]);
      const list = document.createElement("dl");
      for (const [name, value] of rows) {
        const pair = document.createElement("div"), term = document.createElement("dt"), said = document.createElement("dd");
        term.textContent = name;
        said.textContent = value;
        pair.append(term, said);
        list.append(pair);
      }
      told.replaceChildren(list);
    }

    function select(place) {
      if (place < 0 || place >= length) return;
      const chunk = chunks[Math.floor(place / size)];
      if (!chunk.data || !chunk.element.firstChild) { chunk.seek = place; chunk.element.scrollIntoView(); load(chunk); return; }
      chunk.seek = null;
      here?.classList.remove("here");
      here = chunk.element.children[place - chunk.data.from];
      here.classList.add("here");
      here.scrollIntoView({ block: "nearest" });
      tell(place);
      history.replaceState(null, "", `#t${place}`);
    }

    const observer = new IntersectionObserver((entries) => {
      for (const entry of entries) (entry.isIntersecting ? load : drop)(chunks[+entry.target.dataset.number]);
    }, { rootMargin: "500px" });
    const perLine = Math.max(20, box.clientWidth / 7.6), height = Math.ceil(size * 4 / perLine) * 24;
    for (let number = 0; number * size < length; number++) {
      const element = document.createElement("div");
      element.className = "chunk";
      element.dataset.number = number;
      element.style.minHeight = `${height}px`;
      chunks.push({ number, element });
      box.append(element);
      observer.observe(element);
    }

    box.addEventListener("mouseover", (event) => { if (event.target.dataset.at) tell(+event.target.dataset.at); });
    box.addEventListener("click", (event) => { if (event.target.dataset.at) select(+event.target.dataset.at); });
    box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      select(here ? +here.dataset.at + step : 0);
      event.preventDefault();
    });
    const wanted = /^#t(\d+)$/.exec(location.hash);
    if (wanted) select(+wanted[1]);
  }

  document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".tokens").forEach(setUp));
})();
