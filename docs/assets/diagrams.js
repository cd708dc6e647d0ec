// Draws the diagrams of a page with the copy of mermaid in vendor/, which docs/fetch_mermaid.py fetches. Without that copy the
// diagrams stay text. Pages without diagrams do not load it. Colors are those of the theme, light or dark.
const style = `
  .node rect { fill: var(--md-code-bg-color) !important; stroke: var(--md-primary-fg-color) !important; }
  .nodeLabel, .nodeLabel p { color: var(--md-default-fg-color) !important; }
  .flowchart-link, .marker { stroke: var(--md-default-fg-color--light) !important; }
  .marker { fill: var(--md-default-fg-color--light) !important; }`;
const folder = document.currentScript.src.replace(/[^/]*$/, "");
const diagrams = document.querySelectorAll("pre.diagram");
if (diagrams.length) {
  const script = document.createElement("script");
  script.src = `${folder}vendor/mermaid-11.17.2.min.js`;
  script.onload = () => {
    for (const diagram of diagrams) diagram.textContent = diagram.textContent; // removes the code element
    mermaid.initialize({ startOnLoad: false, themeCSS: style });
    mermaid.run({ nodes: diagrams });
  };
  document.body.append(script);
}
