"use strict";
// Keys of the list of approvals: a and r go to the buttons of the request that has the focus, or of the first one.
// Enter then decides, so that no single key approves.
(() => {
  const keys = () => localStorage.getItem("lanekeeper-keys") !== "off";
  const hint = document.getElementById("decide-keys");
  const show = () => { const h = document.getElementById("decide-keys"); if (h) h.hidden = !keys(); };
  if (hint) show();
  document.addEventListener("part", show);
  document.addEventListener("keydown", (e) => {
    if (!keys() || e.ctrlKey || e.metaKey || e.altKey || e.isComposing || document.querySelector("dialog[open]")) return;
    const from = document.activeElement;
    if (from.matches("input:not([type=checkbox],[type=radio]),textarea,select,[contenteditable]")) return;
    const decision = { a: "approve", r: "reject" }[e.key];
    if (!decision) return;
    const row = from.closest("[data-row]") || document;
    const button = row.querySelector(`.decide button[value=${decision}]`);
    if (!button) return;
    e.preventDefault();
    button.focus();
    button.scrollIntoView({ block: "nearest" });
    document.getElementById("said").textContent = button.textContent + ": press Enter";
  });
})();
