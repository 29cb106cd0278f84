/* Charts of an extraction report. Texts of the data reach the page through textContent or `plain`, never as markup. */
(() => {
  "use strict";
  const report = JSON.parse(document.getElementById("facts").textContent);
  const root = document.documentElement;
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const number = new Intl.NumberFormat("en-US");
  const places = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 4 });
  const OUTCOMES = { ok: "c1", truncated: "c2", empty: "c3", null: "c8", bad_text: "c5", too_long: "c6", non_finite: "c7" };
  const WORKERS = ["c1", "c2", "c8", "c6", "c5", "c3", "c7", "c4"];
  const CONFIG = {
    responsive: true, displaylogo: false, plotlyServerURL: "", showSendToCloud: false, showTips: false,
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "toImage"],
  };

  /* Plotly reads a little HTML in its labels: texts of the data must not be read so. */
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const wrap = (text, width, lines) => {
    const words = text.replace(/\s+/g, " ").trim().split(" ").flatMap((word) => word.match(new RegExp(`.{1,${width}}`, "gu")) || []);
    const found = [];
    for (const word of words) {
      const last = found.length - 1;
      if (last >= 0 && found[last].length + word.length < width) found[last] += ` ${word}`;
      else if (found.length === lines) { found[last] += " …"; break; }
      else found.push(word);
    }
    return found.map(plain).join("<br>");
  };

  const layout = (own) => {
    const axis = {
      gridcolor: colour("grid"), zerolinecolor: colour("line"), linecolor: colour("line"),
      tickfont: { color: colour("muted"), size: 12 }, automargin: true, fixedrange: own.fixed !== false,
    };
    const title = (text) => ({ text, font: { color: colour("muted"), size: 12.5 }, standoff: 8 });
    const made = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 8, r: 8, t: 12, b: 8 },
      font: { family: getComputedStyle(document.body).fontFamily, color: colour("ink"), size: 13 },
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink"), size: 12.5 }, align: "left" },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { color: colour("muted") } },
      showlegend: Boolean(own.legend), bargap: 0.06, ...own.more,
      xaxis: { ...axis, title: title(own.x), ...own.xaxis }, yaxis: { ...axis, title: title(own.y), ...own.yaxis },
    };
    if (own.legend) made.margin.t = 36;
    return made;
  };

  const charts = {};
  const narrow = () => innerWidth < 600;
  const draw = (id) => {
    const place = document.getElementById(id);
    if (!place) return;
    const made = charts[id]();
    Plotly.react(place, made.data, made.layout, { ...CONFIG, displayModeBar: made.tools && !narrow() ? "hover" : false });
  };

  charts["chart-files"] = () => {
    const files = report.counts.files.slice(0, 30).reverse();
    document.getElementById("chart-files").style.height = `${90 + 26 * files.length}px`;
    const names = files.map((file) => plain(file.name.length > 34 ? `…${file.name.slice(-33)}` : file.name));
    return {
      data: Object.keys(report.outcomes).map((outcome) => ({
        type: "bar", orientation: "h", name: outcome, y: files.map((_, n) => n), marker: { color: colour(OUTCOMES[outcome] || "c4") },
        x: files.map((file) => (100 * (file.outcomes[outcome] || 0)) / file.num_rows),
        text: files.map((file) => `${plain(cut(file.name, 80))}<br>${outcome}: ${number.format(file.outcomes[outcome] || 0)} of ${number.format(file.num_rows)} rows`),
        hovertemplate: "%{text}<extra></extra>", textposition: "none",
      })),
      layout: layout({ x: "share of rows, %", y: "", legend: true, more: { barmode: "stack" }, xaxis: { range: [0, 100] }, yaxis: { tickvals: files.map((_, n) => n), ticktext: names } }),
    };
  };

  charts["chart-lengths"] = () => {
    const found = report.counts.lengths;
    const middle = found.starts.map((start) => start + (found.width - 1) / 2);
    const last = found.starts.length - 1;
    const label = (n) => (n === last ? `${number.format(found.starts[n])} or more` : found.width > 1 ? `${number.format(found.starts[n])} to ${number.format(found.starts[n] + found.width - 1)}` : number.format(found.starts[n]));
    const text = (counts, what) => counts.map((count, n) => `${label(n)} tokens ${what}<br>${number.format(count)} rows`);
    const limit = found.limit === null ? {} : {
      shapes: [{ type: "line", x0: found.limit + 0.5, x1: found.limit + 0.5, y0: 0, y1: 1, yref: "paper", line: { color: colour("muted"), width: 1.5, dash: "dot" } }],
      annotations: [{ x: found.limit + 0.5, y: 1, yref: "paper", yanchor: "top", xanchor: found.limit > found.starts[last] * 0.6 ? "right" : "left", text: ` limit: ${number.format(found.limit)} `, showarrow: false, font: { color: colour("muted"), size: 12 } }],
    };
    return {
      data: [
        { type: "bar", name: "stored", x: middle, y: found.stored, width: found.width, marker: { color: colour("c1"), line: { color: colour("card"), width: found.width > 1 ? 1 : 0 } }, text: text(found.stored, "stored"), textposition: "none", hovertemplate: "%{text}<extra></extra>" },
        { type: "scatter", mode: "lines", name: "before any cut", x: middle, y: found.original, line: { color: colour("c2"), width: 2, shape: "hvh" }, text: text(found.original, "before any cut"), hovertemplate: "%{text}<extra></extra>" },
      ],
      layout: layout({ x: "tokens in a row", y: "rows", legend: true, more: limit }),
    };
  };

  charts["chart-speed"] = () => {
    const found = report.throughput;
    const timed = found.axis === "time";
    const span = found.edges[found.edges.length - 1];
    const unit = !timed ? 1 : span > 7200 ? 3600 : span > 180 ? 60 : 1;
    const x = found.edges.map((edge) => edge / unit);
    const name = { 1: "seconds", 60: "minutes", 3600: "hours" }[unit];
    return {
      data: found.workers.map((worker, n) => ({
        type: "scatter", mode: "lines", name: plain(cut(worker.name, 60)), x, y: [...found.tokens_per_s[n], found.tokens_per_s[n].at(-1)], stackgroup: timed ? "all" : undefined,
        fill: timed ? undefined : "tozeroy", line: { shape: "hv", width: 1.5, color: colour(WORKERS[n]) },
        hovertemplate: `${timed ? `%{x:.1f} ${name}` : "output file %{x:,.0f}"}<br>%{y:,.0f} tokens a second<extra></extra>`,
      })),
      layout: layout({ x: timed ? `${name} since the start` : "output file", y: "tokens a second", legend: found.workers.length > 1, yaxis: { rangemode: "tozero" } }),
    };
  };

  charts["chart-norms"] = () => {
    const edges = report.states.norm_edges;
    const width = edges[1] - edges[0];
    return {
      data: [{
        type: "bar", x: report.states.norm_counts.map((_, n) => (edges[n] + edges[n + 1]) / 2), y: report.states.norm_counts, width: width * 0.94, marker: { color: colour("c1") }, textposition: "none",
        text: report.states.norm_counts.map((count, n) => `norm ${places.format(edges[n])} to ${places.format(edges[n + 1])}<br>${number.format(count)} states`), hovertemplate: "%{text}<extra></extra>",
      }],
      layout: layout({ x: "norm of a state", y: "states" }),
    };
  };

  const MOST_DIMENSIONS = 3000;
  charts["chart-dimensions"] = () => {
    const { mean, variance, outliers, dead } = report.states;
    const named = new Map([...outliers.map((one) => [one.index, "c2"]), ...dead.map((one) => [one.index, "c5"])]);
    const step = Math.max(1, Math.ceil(mean.length / MOST_DIMENSIONS));
    const others = mean.map((_, index) => index).filter((index) => !named.has(index) && index % step === 0);
    const points = (chosen, more) => ({
      type: "scatter", x: chosen.map((index) => mean[index]), y: chosen.map((index) => Math.sqrt(variance[index])), customdata: chosen,
      hovertemplate: "dimension %{customdata}<br>mean %{x:.4g}<br>spread %{y:.4g}<extra></extra>", ...more,
    });
    const marked = [...named.keys()];
    return {
      data: [
        points(others, { mode: "markers", marker: { color: colour("c1"), size: 5, opacity: 0.5 } }),
        points(marked, { mode: "markers+text", text: marked.map((index, n) => (n < 12 ? String(index) : "")), textposition: "top center", textfont: { size: 11.5, color: colour("muted") }, cliponaxis: false, marker: { color: marked.map((index) => colour(named.get(index))), size: 8 } }),
      ],
      layout: layout({ x: "mean", y: "spread", yaxis: { rangemode: "tozero" } }),
      tools: false,
    };
  };

  const rows = report.sample ? report.sample.rows : [];
  const control = (id) => document.getElementById(id);
  const value = (id, otherwise) => (control(id) ? control(id).value : otherwise);
  let chosen = 0;
  const at = (n) => (value("layout", "pca") === "umap" ? rows[n].umap : rows[n].pca);
  const title = (row) => `Row ${number.format(row.row)}${row.chunk ? `, part ${row.chunk}` : ""}`;

  charts["chart-map"] = () => {
    const wanted = value("find", "").trim().toLowerCase();
    const matches = rows.map((row) => !wanted || row.text.toLowerCase().includes(wanted));
    control("found").textContent = wanted ? `${number.format(matches.filter(Boolean).length)} rows` : "";
    const by = value("colour", "outcome");
    const points = (mine, name, marker) => ({
      type: "scatter", mode: "markers", name, x: mine.map((n) => at(n)[0]), y: mine.map((n) => at(n)[1]), customdata: mine,
      text: mine.map((n) => `<b>${title(rows[n])}</b> · ${rows[n].outcome} · ${number.format(rows[n].num_tokens)} tokens<br>${wrap(rows[n].text, narrow() ? 26 : 54, narrow() ? 3 : 5)}`),
      hovertemplate: "%{text}<extra></extra>",
      marker: { size: rows.length > 4000 ? 5 : 7, opacity: mine.map((n) => (matches[n] ? 0.75 : 0.07)), line: { width: 0 }, ...marker },
    });
    const all = rows.map((_, n) => n);
    const measure = { length: (row) => row.num_tokens, norm: (row) => row.norm, row: (row) => row.row }[by];
    const data = measure
      ? [points(all, by, { color: all.map((n) => measure(rows[n])), colorscale: [[0, colour("accent-soft")], [0.35, colour("c1")], [1, colour("c2")]], showscale: true, colorbar: { thickness: 10, outlinewidth: 0, len: 0.7, tickfont: { color: colour("muted") } } })]
      : Object.keys(OUTCOMES).map((outcome) => [outcome, all.filter((n) => rows[n].outcome === outcome)]).filter(([, mine]) => mine.length)
        .map(([outcome, mine]) => points(mine, outcome, { color: colour(OUTCOMES[outcome]) }));
    const ring = (mine, size, width) => ({ type: "scatter", mode: "markers", x: mine.map((n) => at(n)[0]), y: mine.map((n) => at(n)[1]), hoverinfo: "skip", showlegend: false, marker: { size, color: "rgba(0,0,0,0)", line: { color: colour("ink"), width } } });
    data.push(ring(rows[chosen].neighbours, 12, 1), ring([chosen], 16, 2.5));
    const { explained } = report.sample;
    const pca = value("layout", "pca") === "pca";
    const share = (part) => `${(100 * part).toFixed(1)} %${narrow() ? "" : " of the differences"}`;
    return {
      data, tools: true,
      layout: layout({ x: pca ? `first direction (${share(explained[0])})` : "", y: pca ? `second direction (${share(explained[1])})` : "", legend: !measure && data.length > 3, fixed: false, more: { hovermode: "closest", dragmode: narrow() || matchMedia("(pointer: coarse)").matches ? false : "zoom", uirevision: value("layout", "pca") }, xaxis: { zeroline: false, showticklabels: pca }, yaxis: { zeroline: false, showticklabels: pca } }),
    };
  };

  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const choose = (n) => {
    chosen = (n + rows.length) % rows.length;
    const row = rows[chosen];
    const facts = [row.outcome, `${number.format(row.num_tokens)} tokens`, `norm ${places.format(row.norm)}`, row.id === null ? "" : `id ${row.id}`].filter(Boolean).join(" · ");
    const near = element("ul", "near");
    row.neighbours.forEach((other, k) => {
      const line = element("li");
      const button = element("button");
      button.type = "button";
      button.append(element("span", "cosine", row.cosines[k].toFixed(3)), element("span", "snippet", cut(rows[other].text.replace(/\s+/g, " "), 120) || title(rows[other])));
      button.title = title(rows[other]);
      button.addEventListener("click", () => choose(other));
      line.append(button);
      near.append(line);
    });
    const parts = [element("h3", "", title(row)), element("div", "muted", facts), element("div", "text", row.text || "(no text)")];
    if (row.neighbours.length) parts.push(element("strong", "", "Rows with the most similar states"), element("div", "muted", "with their cosine; 1 is the same direction"), near);
    control("card").replaceChildren(...parts);
    control("position").textContent = `${number.format(chosen + 1)} of ${number.format(rows.length)} sampled`;
    const drawn = control("chart-map");
    if (drawn.data) {
      const last = drawn.data.length - 1;
      const where = (mine, axis) => mine.map((m) => at(m)[axis]);
      Plotly.restyle(drawn, { x: [where(row.neighbours, 0), where([chosen], 0)], y: [where(row.neighbours, 1), where([chosen], 1)] }, [last - 1, last]);
    }
  };

  const drawAll = () => Object.keys(charts).forEach(draw);
  drawAll();
  if (rows.length) {
    choose(0);
    control("chart-map").on("plotly_hover", (event) => { if (event.points[0].customdata !== undefined) choose(event.points[0].customdata); });
    control("chart-map").on("plotly_click", (event) => { if (event.points[0].customdata !== undefined) choose(event.points[0].customdata); });
    control("previous").addEventListener("click", () => choose(chosen - 1));
    control("next").addEventListener("click", () => choose(chosen + 1));
    ["colour", "layout"].forEach((id) => control(id) && control(id).addEventListener("change", () => draw("chart-map")));
    control("find").addEventListener("input", () => draw("chart-map"));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("(max-width: 599px)").addEventListener("change", drawAll);
  addEventListener("beforeprint", () => { root.dataset.print = ""; drawAll(); });
  addEventListener("afterprint", () => { delete root.dataset.print; drawAll(); });
})();
