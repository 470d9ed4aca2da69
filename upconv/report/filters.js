// Filters and the readout of the rooflines. Without this script the whole page is shown.
"use strict";

const FACETS = ["machine", "direction", "dtype", "layout", "dims"];
const form = document.querySelector("form.filters");
const rows = [...document.querySelectorAll("[data-row]")];
const counted = rows.filter((row) => "verdict" in row.dataset);

function chosen() {
  const found = {};
  for (const facet of FACETS) {
    const input = form.querySelector(`input[name="${facet}"]:checked`);
    if (input && input.value) found[facet] = input.value;
  }
  return found;
}

// An element without a facet is indifferent to it.
function fits(element, wanted) {
  return Object.entries(wanted).every(
    ([facet, value]) => !(facet in element.dataset) || element.dataset[facet] === value,
  );
}

// SVG elements have no `hidden` of their own.
function show(element, visible) {
  element.toggleAttribute("hidden", !visible);
}

function times(value) {
  return value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0) + "×";
}

function kindsOf(some) {
  return new Set(some.map(({ dataset: d }) => [d.machine, d.dtype, d.layout, d.direction].join()));
}

// A mean over rows of several kinds would mean nothing.
function describe(visible) {
  const words = `${visible.length} of ${counted.length} rows shown`;
  if (!visible.length) return `${words}: none is of all these kinds`;
  const timed = visible.filter((row) => row.dataset.ratio);
  if (kindsOf(visible).size > 1 || !timed.length) return words;
  const logs = timed.map((row) => Math.log(Number(row.dataset.ratio)));
  const mean = Math.exp(logs.reduce((sum, value) => sum + value, 0) / logs.length);
  const worst = timed.reduce((a, b) => (+b.dataset.ratio < +a.dataset.ratio ? b : a)).dataset;
  const least = `worst ${times(Number(worst.ratio))} (${worst.case})`;
  return `${words}: geometric mean ${times(mean)}, ${least}`;
}

function apply() {
  const wanted = chosen();
  for (const row of rows) show(row, fits(row, wanted));
  for (const group of document.querySelectorAll("[data-group], [data-panel]")) {
    show(group, group.querySelector("[data-row]:not([hidden])") !== null);
  }
  const visible = counted.filter((row) => !row.hidden);
  document.body.classList.toggle("one-kind", kindsOf(visible).size === 1);
  form.querySelector("[data-status]").textContent = describe(visible);
  for (const link of document.querySelectorAll("a[href^='#machine=']")) {
    const kind = Object.fromEntries(new URLSearchParams(link.hash.slice(1)));
    link.toggleAttribute("aria-current", visible.some((row) => fits(row, kind)));
  }
  const address = new URLSearchParams(wanted).toString();
  history.replaceState(null, "", address ? `#${address}` : "#all");
}

// The address carries the choice, so that a filtered page can be sent to someone. Without one
// the first kind is shown: hundreds of rows of different kinds are no answer to anything.
function restore() {
  const first = document.querySelector("a[href^='#machine=']").hash;
  const wanted = new URLSearchParams((location.hash || first).slice(1));
  for (const input of form.querySelectorAll("input")) {
    if ((wanted.get(input.name) ?? "") === input.value) input.checked = true;
  }
  apply();
}

function readOut(event) {
  const point = event.target.closest(".point");
  if (point) {
    document.querySelector("[data-readout]").textContent = point.getAttribute("aria-label");
  }
}

for (const name of ["pointerover", "focusin", "click"]) {
  document.addEventListener(name, readOut);
}
form.addEventListener("change", apply);
form.addEventListener("submit", (event) => event.preventDefault());
form.hidden = form.querySelector("fieldset") === null;
window.addEventListener("hashchange", restore);
restore();
