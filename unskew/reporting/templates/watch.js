"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  let version = 0;

  async function get(address) {
    const answer = await fetch(address);
    if (!answer.ok) throw new Error(answer.statusText);
    return answer.json();
  }

  // The server escapes every text of its HTML, and the policy of the page allows no other script.
  function replace(element, html) {
    const focused = document.activeElement?.id, scrolled = [...element.querySelectorAll(".tall")];
    const places = scrolled.map((area) => [area.id, area.scrollTop, area.scrollLeft]);
    const open = [...element.querySelectorAll("details[open]")].map((part) => part.id);
    element.innerHTML = html;
    open.forEach((id) => byId(id)?.setAttribute("open", ""));
    places.forEach(([id, top, left]) => byId(id)?.scrollTo({ top, left, behavior: "instant" }));
    if (focused && document.activeElement.id !== focused) byId(focused)?.focus({ preventScroll: true });
  }

  function setText(element, text) {  // an unchanged text is not announced again
    if (element.textContent !== text) element.textContent = text;
  }

  const load = async (part) => replace(part.lastElementChild, await get(`details?${part.id.slice(4)}`));

  function addRun(number) {
    const row = document.createElement("tr"), part = document.createElement("details");
    row.id = `row-${number}`;
    part.id = `run-${number}`;
    part.innerHTML = "<summary><h2></h2></summary><div></div>";
    byId("details").append(part);
    byId("runs").tBodies[0].append(row);
  }

  function reorder(parent, children) {
    [...parent.children].filter((child) => !children.includes(child)).forEach((child) => child.remove());
    const focused = document.activeElement;
    if (children.some((child, index) => child !== parent.children[index])) parent.append(...children);
    if (parent.contains(focused)) focused.focus({ preventScroll: true });
  }

  async function poll() {
    let pause = 2000;
    try {
      const answer = await get(`runs?${version}`);
      for (const [number, html] of Object.entries(answer.rows)) {
        if (!byId(`row-${number}`)) addRun(number);
        replace(byId(`row-${number}`), html);
        byId(`run-${number}`).querySelector("h2").textContent = byId(`link-${number}`).textContent;
        if (byId(`run-${number}`).open) await load(byId(`run-${number}`));
      }
      version = answer.version;
      reorder(byId("runs").tBodies[0], answer.order.map((number) => byId(`row-${number}`)));
      reorder(byId("details"), answer.order.map((number) => byId(`run-${number}`)));
      setText(byId("status"), answer.status);
      if (answer.reading) pause = 100;
      if (answer.order.length === 1 && !byId("details").dataset.shown) byId("details").firstChild.open = true;
      byId("details").dataset.shown = "yes";
    } catch {
      setText(byId("status"), "unskew watch does not answer. The page shows the last state and tries again.");
    }
    setTimeout(poll, pause);
  }

  const live = "live" in document.documentElement.dataset;
  document.addEventListener("click", ({ target }) => {
    const part = target.matches?.("a[href^='#run-']") && byId(target.hash.slice(1));
    if (part) part.open = true;
  });
  byId("details").addEventListener("toggle", ({ target }) => {
    if (live && target.open && target.parentElement.id === "details") load(target).catch(() => {});
  }, true);
  if (live) poll();
})();
