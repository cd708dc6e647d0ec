"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const stored = JSON.parse(byId("data").textContent);  // null if a server has the data
  const COLUMNS = [
    ["run", "run"], ["state", "state"], ["method", "method"], ["data", "data"], ["rounds", "rounds"], ["metric", "metric"],
    ["latest", "latest"], ["best", "best"], ["curve", "curve"], ["up", "MB up"], ["down", "MB down"], ["elapsed", "elapsed"],
    ["left", "time left"],
  ];
  const WORDS = ["run", "state", "method", "data", "metric"];
  const rows = new Map();
  let session = null, version = 0, chosen = null, detailsVersion = 0, details = null;

  function setText(element, text) {  // an unchanged text is not read aloud again
    if (element.textContent !== text) element.textContent = text;
  }

  function make(name, attributes = {}, text = "") {
    const drawn = ["svg", "path", "line", "text"].includes(name);
    const element = drawn ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return element;
  }

  function range(values) {
    const low = Math.min(...values), high = Math.max(...values);
    const pad = high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high)) ? 0 : Math.abs(high) * 0.05 || 1;
    return [low - pad, high + pad];
  }

  function ticks([low, high], count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
    const first = Math.ceil(low / step);
    return Array.from({ length: count + 1 }, (_, index) => (first + index) * step).filter((value) => value <= high);
  }

  const scale = ([low, high], from, to) => (value) => from + ((value - low) / (high - low)) * (to - from);

  function line(points, x, y) {
    const d = points.map(([round, value], index) => `${index ? "L" : "M"}${x(round).toFixed(1)} ${y(value).toFixed(1)}`);
    return make("path", { class: "line", d: d.join("") + (points.length === 1 ? "h3" : "") });
  }

  const axes = (points) => [range(points.map(([round]) => round)), range(points.map(([, value]) => value))];

  function smallCurve(points) {
    const image = make("svg", { class: "small", viewBox: "0 0 90 22", "aria-hidden": "true" });
    const [across, up] = points.length ? axes(points) : [];
    if (points.length) image.append(line(points, scale(across, 2, 88), scale(up, 20, 2)));
    return image;
  }

  const short = (value) => String(Number(value.toPrecision(4)));

  function plot({ title, points }) {
    const [across, up] = axes(points), x = scale(across, 70, 745), y = scale(up, 255, 12), parts = [];
    for (const value of ticks(up, 5)) {
      parts.push(make("line", { class: "grid", x1: 70, x2: 745, y1: y(value), y2: y(value) }));
      parts.push(make("text", { x: 64, y: y(value) + 4, "text-anchor": "end" }, short(value)));
    }
    for (const value of ticks(across, 8).filter(Number.isInteger)) {
      parts.push(make("text", { x: x(value), y: 273, "text-anchor": "middle" }, String(value)));
    }
    parts.push(make("text", { x: 405, y: 293, "text-anchor": "middle" }, "round"), line(points, x, y));
    byId("plot").replaceChildren(...parts);
    const [round, value] = points.at(-1), values = points.map((point) => point[1]);
    byId("plot").setAttribute("aria-label", `${title} by round, from ${short(Math.min(...values))} to ` +
      `${short(Math.max(...values))}, ${short(value)} in round ${round}. The table below has the values.`);
  }

  function fill(id, columns, body) {
    const table = byId(id), words = (at) => (at === 0 ? { class: "word" } : {});
    table.tHead.rows[0].replaceChildren(...columns.map((text, at) => make("th", { scope: "col", ...words(at) }, text)));
    table.tBodies[0].replaceChildren(...body.map((cells) => {
      const row = make("tr");
      row.append(...cells.map((text, at) => make("td", words(at), String(text))));
      return row;
    }));
  }

  function showCurve() {
    const curve = details.curves.find(({ name }) => name === byId("metric").value);
    if (!curve) return byId("plot").replaceChildren();
    plot(curve);
    byId("values").caption.textContent = curve.title;
    fill("values", ["round", "value"], curve.points.map(([round, value]) => [round, short(value)]));
  }

  function showDetails() {
    byId("details").hidden = false;
    const list = (id, name, texts) => byId(id).replaceChildren(...texts.map((text) => make(name, {}, text)));
    list("notes", "li", details.notes);
    byId("notes").hidden = !details.notes.length;
    byId("about").replaceChildren(...details.about.flatMap(([what, text]) => [make("dt", {}, what), make("dd", {}, text)]));
    const select = byId("metric"), names = details.curves.map(({ name }) => name), before = select.value;
    if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
      select.replaceChildren(...details.curves.map(({ name, title }) => make("option", { value: name }, title)));
      if (names.includes(before)) select.value = before;
    }
    showCurve();
    const { columns, rows: clients } = details.clients;
    byId("unmeasured").hidden = clients.length > 0;
    byId("measured").hidden = !clients.length;
    fill("clients", columns, clients);
    setText(byId("log"), details.log.join("\n") || "There are no warnings or events.");
  }

  function choose(number) {
    chosen = number;
    detailsVersion = 0;
    for (const [other, row] of rows) row.cells[0].firstChild.setAttribute("aria-current", String(other === number));
    setText(byId("name"), rows.get(number).cells[0].textContent);
    return loadDetails();
  }

  async function loadDetails() {
    const asked = chosen, found = stored ? stored.details[asked] : await get(`details?run=${asked}&since=${detailsVersion}`);
    if (found === null || asked !== chosen) return;
    [details, detailsVersion] = [found, found.version];
    showDetails();
  }

  function showRow(number, texts) {
    if (!rows.has(number)) {
      const row = make("tr"), head = make("th", { scope: "row" }), button = make("button", { type: "button" });
      button.addEventListener("click", () => choose(number).catch(lost));
      head.append(button);
      row.append(head, ...COLUMNS.slice(1).map(([key]) => make("td", WORDS.includes(key) ? { class: "word" } : {})));
      rows.set(number, row);
    }
    COLUMNS.forEach(([key], at) => {
      const cell = rows.get(number).cells[at];
      if (key === "curve") cell.replaceChildren(smallCurve(texts.curve));
      else if (key === "state") setText(cell, texts.state + (texts.notes ? " (with notes)" : ""));
      else setText(at ? cell : cell.firstChild, texts[key]);
    });
  }

  function filter() {
    const wanted = byId("filter").value.toLowerCase();
    for (const row of rows.values()) {
      row.hidden = !WORDS.some((key) => row.cells[COLUMNS.findIndex(([name]) => name === key)].textContent.toLowerCase().includes(wanted));
    }
  }

  function showRuns({ order, rows: changed, notes, reading }) {
    for (const [number, texts] of Object.entries(changed)) showRow(Number(number), texts);
    const shown = order.map((number) => rows.get(number)), body = byId("runs").tBodies[0];
    if (shown.length !== body.rows.length || shown.some((row, at) => row !== body.rows[at])) {
      const focused = document.activeElement;
      body.replaceChildren(...shown);
      if (body.contains(focused)) focused.focus();
    }
    for (const number of rows.keys()) if (!order.includes(number)) rows.delete(number);
    filter();
    const counts = new Map();
    for (const row of shown) {
      const state = row.cells[1].textContent.split(/[ ,]/)[0];
      counts.set(state, (counts.get(state) ?? 0) + 1);
    }
    const parts = [...counts].map(([state, count]) => `${count} ${state}`);
    const when = stored ? ` Written at ${stored.written}.` : reading ? " Reading further runs." : "";
    setText(byId("status"), `${parts.length ? `Runs: ${parts.join(", ")}` : "There are no runs yet"}.${when} ${notes.join(" ")}`.trim());
  }

  async function get(address) {
    const answer = await fetch(address, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    return answer.json();
  }

  function lost() {
    setText(byId("status"), "unskew watch does not answer. The page shows the last state and tries again.");
  }

  async function poll() {
    let pause = 2000;
    try {
      const answer = await get(`runs?since=${version}`);
      if (session !== null && session !== answer.session) return location.reload();  // the command was started again
      [session, version] = [answer.session, answer.version];
      showRuns(answer);
      if (answer.reading) pause = 100;
      if (!rows.has(chosen)) {
        byId("details").hidden = true;
        if (answer.order.length) await choose(answer.order[0]);
      } else {
        await loadDetails();
      }
    } catch {
      lost();
    }
    setTimeout(poll, pause);
  }

  const titles = COLUMNS.map(([key, text]) => make("th", { scope: "col", ...(WORDS.includes(key) ? { class: "word" } : {}) }, text));
  byId("runs").tHead.rows[0].append(...titles);
  byId("metric").addEventListener("change", showCurve);
  byId("filter").addEventListener("input", filter);
  if (stored) {
    showRuns(stored);
    choose(stored.order[0]);
  } else {
    poll();
  }
})();
