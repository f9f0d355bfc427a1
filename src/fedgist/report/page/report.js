"use strict";

// rows: a box ticked off hides a row's marks in every figure and greys it in the tables
for (const box of document.querySelectorAll(".legend input")) {
  box.addEventListener("change", () => {
    const lines = [...document.querySelectorAll("tbody tr")].filter((line) => line.dataset.label === box.dataset.label);
    for (const mark of [...document.querySelectorAll(`.row-${box.dataset.row}`), ...lines]) {
      mark.classList.toggle("off", !box.checked);
    }
  });
}

// tables: a click on a column's name sorts by it, once more the other way round
const UNITS = { k: 1e3, M: 1e6, G: 1e9, T: 1e12 };
function number(text) {
  const parts = text.match(/^\[?([-+]?[\d.]+(?:e[-+]?\d+)?)(?: ([kMGT])?[Bb]\b)?/);
  return parts ? parseFloat(parts[1]) * (UNITS[parts[2]] || 1) : null;
}
function compare(a, b) {
  const [x, y] = [number(a), number(b)];
  if (x !== null && y !== null) return x - y;
  return x === null && y === null ? a.localeCompare(b) : x === null ? 1 : -1;
}
for (const head of document.querySelectorAll(".sortable th")) {
  const sort = () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = head.closest("table").tBodies[0];
    const text = (row) => row.cells[head.cellIndex].textContent;
    const rows = [...body.rows].sort((a, b) => (up ? 1 : -1) * compare(text(a), text(b)));
    body.append(...rows);
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
}

// tables that are wider than the page say so until their end is reached
for (const box of document.querySelectorAll(".scroll")) {
  const mark = () => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
  box.addEventListener("scroll", mark);
  addEventListener("resize", mark);
  mark();
}

// figures: the drawing as a file of its own, dark ink for white paper whatever the page's theme
for (const button of document.querySelectorAll("[data-svg]")) {
  button.addEventListener("click", () => {
    const drawing = document.querySelector(`#${button.dataset.svg} svg`).cloneNode(true);
    const text = new XMLSerializer().serializeToString(drawing)
      .replaceAll("currentColor", "#010101").replaceAll(/var\(--\w+, (#\w+)\)/g, "$1");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
    link.download = `${button.dataset.svg}.svg`;
    link.click();
    URL.revokeObjectURL(link.href);
  });
}

// light and dark: the reader's system decides until the button does
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
