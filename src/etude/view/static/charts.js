// Draws the charts of a page: lines with their intervals, in the colours of the theme.
(() => {
  const drawn = new Set();
  const probe = document.createElement("span");
  const colour = (name) => {
    document.body.append(probe);
    probe.style.color = `var(--${name})`;
    const value = getComputedStyle(probe).color;
    probe.remove();
    return value;
  };
  const faint = (value) => value.replace("rgb(", "rgba(").replace(")", ", 0.14)");
  const shown = (value) => value == null ? "–" : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3)
    ? value.toExponential(2) : String(+value.toPrecision(4));

  function draw(figure) {
    const chart = JSON.parse(figure.dataset.chart), plot = figure.querySelector(".plot");
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("rule"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const columns = [chart.x], series = [{ label: "epoch" }], bands = [];
    chart.lines.forEach((line, index) => {
      const stroke = colour(`line-${index % 6 + 1}`);
      columns.push(line.values);
      series.push({ label: line.label, stroke, width: 1.6, dash: line.is_dotted ? [2, 3] : undefined,
        spanGaps: true, points: { show: line.values.filter((value) => value != null).length < 40, size: 4, fill: stroke },
        value: (_, value) => shown(value) });
      if (line.low) {
        const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
        columns.push(line.high, line.low);
        series.push({ ...edge, class: "edge" }, { ...edge, class: "edge" });
        bands.push({ series: [series.length - 2, series.length - 1], fill: faint(stroke) });
      }
    });
    plot.replaceChildren();
    const u = new uPlot({
      width: plot.clientWidth, height: 170, series, bands, padding: [8, 8, 0, 0],
      scales: { x: { time: false }, y: { range: (_, low, high) => {
        const room = high > low ? (high - low) * 0.08 : Math.abs(high) * 0.1 || 0.5;
        return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
      } } },
      axes: [{ ...axis, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] },
             { ...axis, size: (_, values) => Math.max(52, 14 + 7 * Math.max(0, ...(values || []).map((each) => each.length))), values: (_, values) => values.map(shown) }],
      cursor: { sync: { key: "epochs" }, points: { size: 5 } },
      legend: { markers: { width: 2 } },
    }, columns, plot);
    drawn.add({ figure, plot, u });
  }

  function drawAll() {
    for (const each of drawn) { each.u.destroy(); }
    drawn.clear();
    document.querySelectorAll("figure[data-chart]").forEach(draw);
  }

  document.addEventListener("DOMContentLoaded", drawAll);
  document.addEventListener("htmx:afterSwap", (event) => { if (event.target.id === "charts") drawAll(); });
  document.addEventListener("etude:theme", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let wait = 0;
  addEventListener("resize", () => {
    clearTimeout(wait);
    wait = setTimeout(() => drawn.forEach(({ plot, u }) => u.setSize({ width: plot.clientWidth, height: 170 })), 100);
  });
})();
