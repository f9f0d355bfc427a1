"use strict";

// every few seconds the fragment is fetched, and the sections that changed are replaced
const main = document.getElementById("state");
const summary = document.getElementById("summary");
const ended = document.getElementById("ended");
const every = 1000 * Number(main.dataset.every);
const address = location.pathname.replace(/\/*$/, "/state");
const PATIENCE = 2; // failures in a row until the page says that the watch ended
let failures = 0;

function replaced(before, after) {
  if (before.outerHTML === after.outerHTML) return;
  const places = [...before.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
  const focus = [...before.querySelectorAll(".scroll")].indexOf(document.activeElement);
  before.replaceWith(after);
  after.querySelectorAll(".scroll").forEach((box, i) => {
    box.scrollLeft = places[i] || 0;
    if (i === focus) box.focus({ preventScroll: true });
  });
}

function show(text) {
  const fresh = new DOMParser().parseFromString(`<main>${text}</main>`, "text/html").querySelector("main");
  const ids = (node) => [...node.children].map((child) => child.id).join(" ");
  if (ids(fresh) === ids(main)) {
    [...fresh.children].forEach((child, i) => replaced(main.children[i], child));
  } else {
    main.replaceChildren(...fresh.childNodes);
  }
  const now = document.getElementById("now").dataset;
  document.title = `${now.title} - fedgist watch`;
  if (summary.textContent !== now.summary) summary.textContent = now.summary; // screen readers announce it
}

function reached(yes) {
  failures = yes ? 0 : failures + 1;
  const over = failures >= PATIENCE;
  if (ended.hidden !== over) return;
  ended.hidden = !over;
  ended.textContent = over ? "The watch ended: this page shows the last state that it received." : "";
  document.body.classList.toggle("over", over);
}

async function refresh() {
  try {
    const answer = await fetch(address, { cache: "no-store", signal: AbortSignal.timeout(30000) });
    if (!answer.ok) throw new Error(answer.status);
    show(await answer.text());
    reached(true);
  } catch {
    reached(false);
  }
  setTimeout(refresh, every);
}
setTimeout(refresh, every);
