"use strict";
(() => {
  const valueOf = (cell) => (cell.dataset.value === undefined ? null : Number(cell.dataset.value));

  function sorted(table, column, head) {
    const down = head.getAttribute("aria-sort") === "descending" || (!head.hasAttribute("aria-sort") && head.className === "word");
    table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const [x, y] = [a.cells[column], b.cells[column]], [m, n] = [valueOf(x), valueOf(y)];
      if (m === null && n === null) return (down ? 1 : -1) * x.textContent.localeCompare(y.textContent);
      if (m === null || n === null) return m === null ? 1 : -1;  // what is not there comes last
      return down ? m - n : n - m;
    });
    table.tBodies[0].append(...rows);
  }

  const shownRows = (table) => [...table.tBodies[0].rows].filter((row) => !row.hidden);
  const titles = (table) => [...table.tHead.rows[0].cells].map((head) => head.textContent.trim());

  function csv(table) {
    // Spreadsheets calculate text that starts like a formula; an apostrophe keeps it text. Numbers, and "-", stay.
    const inert = (text) => (/^[=+\-@\t\r\n＝＋－＠]./s.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text);
    const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text);
    const rows = shownRows(table).map((row) => [...row.cells]);
    const spread = titles(table).map((_, at) => rows.some((row) => row[at].dataset.std !== undefined));
    const head = titles(table).flatMap((title, at) => (spread[at] ? [title, `${title}, std`] : [title]));
    const lines = rows.map((row) => row.flatMap((cell, at) => {
      const text = cell.dataset.value ?? cell.textContent;
      return spread[at] ? [text, cell.dataset.std ?? ""] : [text];
    }));
    return [head, ...lines].map((line) => line.map(inert).map(quoted).join(",")).join("\n") + "\n";
  }

  function latex(table) {
    const special = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$" };
    const safe = (text) => text.replace(/[\\~^±&%$#_{}]/g, (c) => special[c] || `\\${c}`);
    const heads = [...table.tHead.rows[0].cells];
    const line = (words) => `${words.map(safe).join(" & ")} \\\\`;
    return [
      `\\begin{tabular}{${heads.map((head) => (head.className === "word" ? "l" : "r")).join("")}}`, "\\hline",
      line(titles(table)), "\\hline", ...shownRows(table).map((row) => line([...row.cells].map((cell) => cell.textContent))),
      "\\hline", "\\end{tabular}",
    ].join("\n") + "\n";
  }

  async function copy(text, box) {
    const area = box.querySelector("textarea"), said = box.querySelector("[role=status]");
    area.hidden = false;
    area.value = text;
    area.select();
    try {
      await navigator.clipboard.writeText(text);
      said.textContent = "Copied.";
    } catch {
      said.textContent = "Press Ctrl+C to copy what is selected.";
    }
  }

  document.querySelectorAll("table.sortable").forEach((table) => {
    table.querySelectorAll("th").forEach((head, column) =>
      head.querySelector("button").addEventListener("click", () => sorted(table, column, head)));
  });
  // A table that does not fit says so; its first column stays in sight.
  const fit = () => document.querySelectorAll(".scroll").forEach((box) => {
    const hint = box.parentElement.querySelector(".hint");
    if (hint) hint.hidden = box.scrollWidth <= box.clientWidth + 1;
  });
  // In the next frame, because changing sizes while sizes are reported is an error.
  new ResizeObserver(() => requestAnimationFrame(fit)).observe(document.body);
  document.querySelectorAll("details").forEach((one) => one.addEventListener("toggle", fit));
  document.querySelectorAll("[data-copy]").forEach((button) => button.addEventListener("click", () => {
    const box = button.closest(".copyable");
    const write = { csv: () => csv(box.querySelector("table")), latex: () => latex(box.querySelector("table")),
      text: () => box.querySelector("pre").textContent };
    copy(write[button.dataset.copy](), box);
  }));
  document.querySelectorAll("select[data-groups]").forEach((select) => select.addEventListener("change", () => {
    select.closest(".copyable").querySelectorAll("tbody tr").forEach((row) => { row.hidden = row.dataset.group !== select.value; });
  }));
})();
