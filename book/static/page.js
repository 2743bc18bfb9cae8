// On every page: boxes that scroll can be reached by keyboard, and a page opened as a file says how to get the rest.
(() => {
  const reach = () => {
    for (const box of document.querySelectorAll(".bd-article pre, .kv-table, .bd-article .math, .bd-article mjx-container, " +
        ".pst-scrollable-table-container, .cell_output > .output")) {
      if (box.scrollWidth > box.clientWidth + 1 && !box.hasAttribute("tabindex")) box.tabIndex = 0;
    }
  };
  addEventListener("load", reach);
  addEventListener("resize", reach);
  window.MathJax?.startup?.promise?.then(reach);
  if (location.protocol === "file:") {
    const note = document.createElement("p");
    note.className = "kv-note";
    note.textContent = "This page was opened as a file: figures and live controls need a web server. In the book's " +
      "folder run: python3 -m http.server --directory _build/html";
    document.querySelector(".bd-article")?.prepend(note);
  }
})();
