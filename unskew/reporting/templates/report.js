"use strict";
(() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const SYMBOLS = {
    o: "circle", s: "square", D: "diamond", "^": "triangle-up", v: "triangle-down",
    P: "cross", X: "x", "*": "star", "<": "triangle-left", ">": "triangle-right",
  };
  const AXES = { round: "communication round", mb: "traffic of all clients, up and down (MB)", seconds: "seconds", simulated: "simulated seconds" };
  const CONFIG = {
    responsive: true, displaylogo: false,
    modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
  };
  // Names come from data: a figure shows them as they are, not as its own mark-up.
  const plain = (text) => String(text).replace(/[&<>%]/g, (c) => `&#${c.charCodeAt(0)};`);
  const short = (text, most = 34) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const faint = (hex, alpha) => {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  };
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function layout(more) {
    const axis = { gridcolor: color("--grid"), linecolor: color("--rule"), zerolinecolor: color("--rule"), automargin: true };
    return {
      ...more,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: more.hovermode || "closest",
      font: { color: color("--ink"), family: "system-ui, sans-serif", size: 13 },
      margin: { l: 60, r: 20, t: 24, b: 50 },
      hoverlabel: { bgcolor: color("--raised"), bordercolor: color("--rule"), font: { color: color("--ink") } },
      modebar: { color: color("--soft"), activecolor: color("--ink"), bgcolor: "rgba(0,0,0,0)" },
      xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
    };
  }

  // Rounds are whole: of a few each has a tick, of many plotly chooses whole ones itself.
  const whole = (traces) => (Math.max(0, ...traces.flatMap((one) => one.x || [])) <= 12 ? { tick0: 1, dtick: 1 } : {});

  class Part {
    constructor(box, content) {
      this.box = box;
      this.content = content;
      this.hidden = new Set();
      this.find = (what) => box.querySelector(`[data-role="${what}"]`);
      this.chosen = (name) => box.querySelector(`[data-choice="${name}"] :checked`)?.value;
      box.querySelectorAll(".legend input").forEach((input) => input.addEventListener("change", () => {
        this.hidden[input.checked ? "delete" : "add"](input.value);
        this.draw();
      }));
      box.querySelectorAll("[data-choice]").forEach((choice) => choice.addEventListener("change", (event) => {
        if (choice.dataset.choice === "axis") this.find("log").checked = event.target.value === "mb";
        this.draw();
      }));
      this.find("log")?.addEventListener("change", () => this.draw());
      box.querySelectorAll(".plot").forEach(byKeys);
      box.querySelectorAll("[data-reset]").forEach((button) =>
        button.addEventListener("click", () => reset(this.find(button.dataset.reset))));
      if (box.tagName === "DETAILS") box.addEventListener("toggle", () => this.draw());
    }

    get open() { return this.box.tagName !== "DETAILS" || this.box.open; }

    methods() { return this.content.methods.filter((one) => !this.hidden.has(one.label)); }

    draw() {
      if (!this.open) return;
      this.curves();
      this.measured();
      this.map();
      this.boxes();
      this.evaluation();
      this.classifier();
      this.survival();
    }

    show(role, traces, more, describe) {
      const place = this.find(role);
      if (!place) return;
      place.setAttribute("aria-label", describe);
      Plotly.react(place, traces, layout(more), CONFIG);
    }

    // Mean and band of each method; `lines` holds them by the method's label.
    lines(lines, axis) {
      const bands = [], means = [];
      const there = this.methods().filter((one) => lines[one.label]?.[axis]);
      there.forEach((one, place) => {
        const line = lines[one.label], x = line[axis];
        if (line.std.length && x.length > 1) {
          bands.push({
            x: [...x, ...[...x].reverse()],
            y: [...line.mean.map((m, i) => m + line.std[i]), ...line.mean.map((m, i) => m - line.std[i]).reverse()],
            fill: "toself", fillcolor: faint(one.color, 0.14), line: { width: 0 }, mode: "lines", hoverinfo: "skip",
          });
        }
        const spread = line.std.length ? " ± %{customdata:.4~g}" : "";
        means.push({
          x, y: line.mean, customdata: line.std, name: plain(one.label), mode: x.length > 60 ? "lines" : "lines+markers",
          // Methods may lie on top of each other: the lower ones are wider, so that each can be seen.
          line: { color: one.color, dash: one.dash, width: 2 + Math.min(4, there.length - 1 - place) },
          marker: { color: one.color, symbol: SYMBOLS[one.marker], size: 5 },
          hovertemplate: `<b>${plain(one.label)}</b><br>${axis === "round" ? "round" : axis === "mb" ? "MB" : "seconds"} `
            + `%{x:.5~g}: %{y:.4~g}${spread}<extra></extra>`,
        });
      });
      return [...bands, ...means];
    }

    curves() {
      const { metric_titles: titles, lines, target } = this.content.curves;
      const figure = this.chosen("figure"), axis = this.chosen("axis"), log = this.find("log")?.checked;
      if (!figure) return;
      const chosen = Object.fromEntries(Object.entries(lines).map(([label, line]) => [label, line[figure]]));
      const goal = figure === this.content.curves.scored && target !== null;
      const traces = this.lines(chosen, axis);
      this.show("curves", traces, {
        uirevision: `${figure} ${axis} ${log}`, hovermode: axis === "round" ? "x" : "closest",
        xaxis: { title: { text: AXES[axis] }, type: log ? "log" : "linear", ...(log ? { dtick: 1 } : axis === "round" ? whole(traces) : {}), exponentformat: "none" },
        yaxis: { title: { text: titles[figure] } },
        shapes: goal ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: target, y1: target,
          line: { color: color("--soft"), width: 1, dash: "dash" } }] : [],
        annotations: goal ? [{ xref: "paper", x: 0, y: target, xanchor: "left", yanchor: "bottom", showarrow: false,
          text: `target ${+target.toPrecision(3)}${this.content.curves.unit}`, font: { color: color("--soft"), size: 12 } }] : [],
      }, `${titles[figure]} against ${AXES[axis]}, a line per method; the tables give the same in numbers.`);
    }

    measured() {
      const name = this.chosen("measure");
      if (name === undefined) return;
      const { titles, lines, dots } = this.content.measured;
      const traces = this.lines(lines[name] || {}, "round");
      for (const one of this.methods()) {
        const marks = (dots[name] || {})[one.label];
        if (marks) {
          traces.push({ x: marks.round, y: marks.value, mode: "markers", name: plain(one.label),
            marker: { color: one.color, symbol: SYMBOLS[one.marker], size: marks.round.length > 300 ? 4 : 8, opacity: 0.6 },
            hovertemplate: `<b>${plain(one.label)}</b><br>round %{x}: %{y:.4~g}<extra></extra>` });
        }
      }
      this.show("measured", traces, {
        uirevision: name, xaxis: { title: { text: AXES.round }, ...whole(traces) }, yaxis: { title: { text: plain(short(titles[name], 48)) } },
      }, `${titles[name]} in every round, by method.`);
    }

    map() {
      const held = this.content.holdings[Number(this.chosen("partition") || 0)];
      if (!held) return;
      if (held.map) {
        const { rows, classes, counts, shares } = held.map;
        const share = this.chosen("cells") !== "counts";
        const told = rows.map((row, k) => classes.map((name, c) => `<b>${plain(row)}</b><br>class ${plain(name)}: `
          + `${+counts[k][c].toFixed(1)} samples, ${(100 * shares[k][c]).toFixed(1)} &#37;`));
        const ticks = (names, most) => {
          const step = Math.max(1, Math.ceil(names.length / most));
          const at = names.map((_, i) => i).filter((i) => i % step === 0);
          return { tickvals: at, ticktext: at.map((i) => plain(short(names[i], 18))) };
        };
        this.find("map").style.setProperty("height", `${Math.min(680, Math.max(360, 120 + 13 * rows.length))}px`);
        const two = share && held.prevalence;
        const gap = rows.length * classes.length < 1500 ? 1 : 0.2;
        if (two) {
          const percent = (values) => values.map((v) => 100 * v);
          const at = two.rows.map((_, k) => k);
          this.show("map", [{
            type: "scatter", mode: "markers", x: percent(two.share), y: at, marker: { color: color("--mark"), size: 7 },
            error_x: { array: percent(two.high.map((v, k) => v - two.share[k])), arrayminus: percent(two.low.map((v, k) => two.share[k] - v)),
              thickness: 1.2, width: 0, color: color("--mark") },
            customdata: at.map((k) => `<b>${plain(two.rows[k])}</b><br>${(100 * two.share[k]).toFixed(1)} &#37; of ${two.counts[k]} samples, `
              + `95 &#37; interval ${(100 * two.low[k]).toFixed(1)} to ${(100 * two.high[k]).toFixed(1)}`),
            hovertemplate: "%{customdata}<extra></extra>",
          }], {
            xaxis: { title: { text: `share of class ${plain(short(two.title, 48))}, %` }, rangemode: "tozero" },
            yaxis: { autorange: "reversed", ...ticks(two.rows, 25) },
            shapes: [{ type: "line", x0: 100 * two.all, x1: 100 * two.all, yref: "paper", y0: 0, y1: 1, line: { dash: "dash", width: 1 } }],
          }, `Share of ${two.title} at ${two.rows.length} clients, with 95 % intervals.`);
        } else this.show("map", [{
          type: "heatmap", z: share ? shares.map((row) => row.map((v) => 100 * v)) : counts, colorscale: "Cividis",
          zmin: 0, ...(share ? { zmax: 100 } : {}), xgap: gap, ygap: gap, customdata: told,
          hovertemplate: "%{customdata}<extra></extra>",
          colorbar: { title: { text: share ? "% of the client" : "samples", side: "right" }, thickness: 12, outlinewidth: 0 },
        }], {
          xaxis: { title: { text: "class" }, showgrid: false, zeroline: false, ...ticks(classes, 30) },
          yaxis: { autorange: "reversed", showgrid: false, zeroline: false, ...ticks(rows, 25) },
        }, `Heat map of ${rows.length} rows of clients and ${classes.length} classes.`);
        this.find("map-note").textContent = two ? "Bars: 95 % intervals (Wilson). Dashed: all clients shown." : held.map.note;
      }
      const place = this.find("sizes");
      if (place) {
        this.show("sizes", [{
          type: "bar", y: held.sizes, customdata: held.who.map(plain), marker: { color: color("--mark") },
          hovertemplate: "<b>%{customdata}</b><br>%{y} samples<extra></extra>",
        }], {
          xaxis: { title: { text: "clients, from the largest" }, showticklabels: false },
          yaxis: { title: { text: "training samples" } },
        }, "Training samples of each client, from the largest to the smallest.");
      }
      this.box.querySelectorAll("[data-partition]").forEach((table) => {
        table.hidden = table.dataset.partition !== String(Number(this.chosen("partition") || 0));
      });
    }

    classifier() {
      const kind = this.chosen("kind");
      if (!kind) return;
      const [xTitle, yTitle] = this.content.classifier.axes[kind], lines = this.content.classifier.lines[kind];
      const traces = this.methods().filter((one) => lines[one.label]).map((one) => ({
        ...lines[one.label], name: plain(one.label), mode: kind === "calibration" ? "lines+markers" : "lines",
        line: { color: one.color, dash: one.dash, width: 2 }, marker: { color: one.color, symbol: SYMBOLS[one.marker], size: 6 },
        hovertemplate: `<b>${plain(one.label)}</b><br>${xTitle} %{x:.3f}, ${yTitle} %{y:.3f}<extra></extra>`,
      }));
      const chance = { type: "line", x0: 0, y0: 0, x1: 1, y1: 1, line: { color: color("--soft"), width: 1, dash: "dash" } };
      this.show("classifier", traces, {
        uirevision: kind, xaxis: { title: { text: xTitle } }, yaxis: { title: { text: yTitle } }, shapes: kind === "pr" ? [] : [chance],
      }, `${yTitle} against ${xTitle} on the test set, a line per method.`);
    }

    survival() {
      const kind = this.chosen("survived"), who = this.chosen("who");
      if (!kind) return;
      const { observed, predicted, calibration } = this.content.survival, curve = kind === "curve";
      const named = (line, name, style, shape) => ({
        ...line, name: plain(name), mode: curve ? "lines" : "lines+markers", line: { ...style, width: 2, shape }, marker: { ...style, size: 6 },
        hovertemplate: `<b>${plain(name)}</b><br>%{x:.4~g}: %{y:.3f}<extra></extra>`,
      });
      const lines = curve ? predicted[who] || {} : calibration[kind];
      const traces = this.methods().filter((one) => lines[one.label])
        .map((one) => named(lines[one.label], one.label, { color: one.color, dash: curve ? "dash" : one.dash, symbol: SYMBOLS[one.marker] }));
      if (curve) {
        const faded = who === "" ? 0.5 : 1;
        Object.entries(observed).filter(([name]) => [name, ""].includes(who))
          .forEach(([name, line]) => traces.push({ ...named(line, name, { color: color("--ink") }, "hv"), opacity: faded }));
      }
      const [xTitle, yTitle] = curve ? ["time", "survival"] : [`mean predicted risk at ${kind}`, "observed risk"];
      const equal = { type: "line", x0: 0, y0: 0, x1: 1, y1: 1, line: { color: color("--soft"), width: 1, dash: "dash" } };
      this.show("survival", traces, {
        uirevision: `${kind} ${who}`, xaxis: { title: { text: xTitle } },
        yaxis: { title: { text: yTitle }, ...(curve ? { range: [0, 1.02] } : {}) }, shapes: curve ? [] : [equal],
      }, `${yTitle} against ${xTitle}, a line per method or client.`);
    }

    evaluation() {
      const one = this.content.evaluations[Number(this.chosen("evaluated") || 0)];
      if (!one || !this.find("sites")) return;
      const chosen = this.chosen("score"), name = chosen in one.metrics ? chosen : Object.keys(one.metrics)[0];
      if (name === undefined) return;
      const axis = one.metrics[name], unit = axis.endsWith("(%)") ? " &#37;" : "", points = one.points[name];
      const styles = { global: ["circle", "--mark"], local: ["square", "--ink"], personal: ["diamond", "--soft"] };
      const models = Object.keys(points);
      const at = one.sites.map((_, k) => k), ticktext = one.sites.map((site) => plain(short(site, 18)));
      const traces = models.map((model, place) => {
        const [symbol, ink] = styles[model] || ["x", "--ink"], of = points[model];
        return {
          type: "scatter", mode: "markers", x: of.map((p) => p[1]), y: of.map((p) => p[0] + 0.2 * (place - (models.length - 1) / 2)),
          marker: { symbol, color: color(ink), size: 8 },
          error_x: { array: of.map((p) => p[3] - p[1]), arrayminus: of.map((p) => p[1] - p[2]), thickness: 1.2, width: 0, color: color(ink) },
          customdata: of.map((p) => `<b>${plain(one.sites[p[0]])}</b>, ${plain(model)} model, ${p[4]} samples<br>`
            + `${+p[1].toPrecision(4)}${unit}, interval ${+p[2].toPrecision(4)} to ${+p[3].toPrecision(4)}`),
          hovertemplate: "%{customdata}<extra></extra>",
        };
      });
      const yaxis = { autorange: "reversed", tickvals: at, ticktext, showgrid: false, zeroline: false };
      this.find("sites").style.setProperty("height", `${110 + 40 * Math.max(2, at.length)}px`);
      this.show("sites", traces, { uirevision: name, xaxis: { title: { text: plain(axis) } }, yaxis },
        `${axis} at ${at.length} sites, with intervals; the table gives the same in numbers.`);
      const matrix = one.matrix[name];
      if (!matrix || !this.find("matrix")) return;
      this.show("matrix", [{
        type: "heatmap", z: matrix.cells, colorscale: "Cividis", xgap: 1, ygap: 1, hoverongaps: true,
        customdata: matrix.cells.map((line, k) => line.map((value, c) => `<b>${plain(matrix.rows[k])}</b><br>on ${plain(one.sites[c])}: `
          + (value === null ? plain(matrix.reasons[k][c] || "no value") : `${+value.toPrecision(4)}${unit}`))),
        hovertemplate: "%{customdata}<extra></extra>", colorbar: { thickness: 12, outlinewidth: 0 },
      }], {
        xaxis: { title: { text: "held-out samples of" }, tickvals: at, ticktext, showgrid: false, zeroline: false },
        yaxis: { ...yaxis, tickvals: matrix.rows.map((_, k) => k), ticktext: matrix.rows.map((row) => plain(short(row, 24))) },
      }, `Heat map of ${axis}: ${matrix.rows.length} models on the samples of ${at.length} sites.`);
    }

    boxes() {
      const whose = this.chosen("whose");
      const found = whose && this.content.boxes[whose];
      if (!found) return;
      const traces = [], there = this.methods().filter((one) => found[one.label]);
      const axis = this.content.axes[whose], unit = axis.endsWith("(%)") ? " &#37;" : "";
      there.forEach((one, place) => {
        const of = found[one.label], y = there.length - 1 - place;
        traces.push({
          type: "box", orientation: "h", y: [y], q1: [of.low], median: [of.median], q3: [of.high], lowerfence: [of.least],
          upperfence: [of.most], mean: [of.mean], boxmean: true, width: 0.42, line: { color: one.color, width: 1.5 },
          fillcolor: faint(one.color, 0.15), hoverinfo: "skip",
        }, {
          x: of.dots, y: of.dots.map((_, i) => y + 0.38 * (((i * 0.618034) % 1) - 0.5)), mode: "markers",
          marker: { color: one.color, size: 5, opacity: 0.55 }, customdata: of.who.map(plain),
          hovertemplate: `<b>${plain(one.label)}</b><br>%{customdata}: %{x:.4~g}${unit}<extra></extra>`,
        }, {
          x: [of.decile], y: [y], mode: "markers",
          marker: { symbol: "diamond", size: 11, color: color("--ground"), line: { color: one.color, width: 2 } },
          hovertemplate: `<b>${plain(one.label)}</b><br>mean of the worst tenth: %{x:.4~g}${unit}<extra></extra>`,
        });
      });
      const place = this.find("boxes");
      place.style.setProperty("height", `${110 + 62 * Math.max(1, there.length)}px`);
      this.show("boxes", traces, {
        xaxis: { title: { text: plain(axis) } },
        yaxis: { tickvals: there.map((_, i) => there.length - 1 - i), ticktext: there.map((one) => plain(short(one.label))),
          showgrid: false, zeroline: false, range: [-0.6, Math.max(1, there.length) - 0.4] },
      }, "Metrics of clients, a box per method; the table of fairness gives the same in numbers.");
    }
  }

  const reset = (place) => Plotly.relayout(place, { "xaxis.autorange": true, "yaxis.autorange": ["map", "sites", "matrix"].includes(place.dataset.role) ? "reversed" : true });

  // Zoom and pan without a mouse: + and - zoom, arrows move, 0 shows all.
  function byKeys(place) {
    place.addEventListener("keydown", (event) => {
      if (!place._fullLayout) return;
      const { xaxis, yaxis } = place._fullLayout;
      const moved = (axis, scale, shift) => {
        const [a, b] = axis.range, middle = (a + b) / 2 + shift * (b - a), half = ((b - a) / 2) * scale;
        return [middle - half, middle + half];
      };
      const step = { ArrowLeft: [1, -0.1, 0], ArrowRight: [1, 0.1, 0], ArrowUp: [1, 0, 0.1], ArrowDown: [1, 0, -0.1],
        "+": [0.8, 0, 0], "-": [1.25, 0, 0] }[event.key];
      if (event.key === "0") reset(place);
      else if (step) {
        Plotly.relayout(place, { "xaxis.range": moved(xaxis, step[0], step[1]), "yaxis.range": moved(yaxis, step[0], step[2]) });
      } else return;
      event.preventDefault();
    });
  }

  // ---- light and dark -------------------------------------------------------------------------------------------------

  const parts = [...document.querySelectorAll(".part")].map((box, at) => new Part(box, data.parts[at]));
  const drawAll = () => parts.forEach((part) => part.draw());
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const toggle = document.getElementById("theme");
  const label = () => { toggle.textContent = dark() ? "Light" : "Dark"; };
  toggle.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); drawAll(); });
  system.addEventListener("change", () => { label(); drawAll(); });
  let before;
  addEventListener("beforeprint", () => { before = root.dataset.theme; root.dataset.theme = "light"; drawAll(); });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    drawAll();
  });
  document.querySelectorAll("nav a").forEach((link) => link.addEventListener("click", () => {
    const box = document.querySelector(link.getAttribute("href"));
    if (box.tagName === "DETAILS") box.open = true;
  }));
  label();
  drawAll();
  root.dataset.ready = "yes";
})();
