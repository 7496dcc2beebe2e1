"use strict";
// Keys of a case: g and b go to the buttons that label the shown trial, and Enter labels it. u withdraws the label, j
// and k go to the next and the previous trial. They come before the keys of all pages; g still leads to other pages.
(() => {
  const on = () => localStorage.getItem("lanekeeper-keys") !== "off";
  const show = () => { const hint = document.getElementById("label-keys"); if (hint) hint.hidden = !on(); };
  show();
  document.addEventListener("part", show);
  document.addEventListener("keydown", (e) => {
    if (!on() || e.ctrlKey || e.metaKey || e.altKey || e.isComposing || e.repeat || document.querySelector("dialog[open]")) return;
    const from = document.activeElement;
    if (from.matches("input:not([type=checkbox],[type=radio]),textarea,select,[contenteditable]")) return;
    const label = { g: "good", b: "bad", u: "none" }[e.key];
    const target = label ? document.querySelector(`#label-form button[value=${label}]`)
      : { j: document.querySelector("a[rel=next]"), k: document.querySelector("a[rel=prev]") }[e.key];
    if (!label && !"jk".includes(e.key)) return;
    e.preventDefault();
    if (e.key !== "g") e.stopImmediatePropagation();
    if (target && "gb".includes(e.key)) {
      target.focus();
      document.getElementById("said").textContent = target.value + ": press Enter";
    } else if (target) target.click();
    else document.getElementById("said").textContent = label ? "There is nothing to label or undo" : "There is no further trial";
  }, true);
})();
