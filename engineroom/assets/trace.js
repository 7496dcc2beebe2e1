"use strict";
// The waterfall of a trace or an execution: lines collapse, the drawing zooms, filters act at once, and a span opens in
// the panel without loading the page. Without this script lines are links, and the filter is a form.
(() => {
  const $ = (id) => document.getElementById(id);
  if (!$("view")) return;
  const root = document.documentElement;
  const collapsed = new Set(); // ids of rows
  const zoom = { by: 1, from: 0 }; // from is the share of the whole at the left edge
  let rows = []; // of the waterfall
  let current = ""; // id of the row that Tab reaches
  const level = (row) => Number(row.getAttribute("aria-level"));
  const say = (text) => { $("said").textContent = text; };

  // Lines: which are shown.
  const wanted = () => {
    const form = document.querySelector(".wf-tools");
    return form ? { text: form.q.value.trim().toLowerCase(), kind: form.kind.value, errors: form.errors.checked } : {};
  };
  const layOut = () => {
    const w = wanted();
    const filtered = Boolean(w.text || w.kind || w.errors);
    const has = (row) => (!w.errors || row.classList.contains("wf-bad")) && (!w.kind || row.dataset.kind === w.kind) &&
      (!w.text || (row.dataset.find || "").toLowerCase().includes(w.text));
    let shown = 0, need = 0; // need is the level of the line around a wanted one
    for (let i = rows.length - 1; filtered && i >= 0; i--) {
      const at = level(rows[i]), show = has(rows[i]) || at === need;
      if (show) { need = at - 1; shown++; }
      rows[i].hidden = !show;
    }
    for (let i = 0, closed = Infinity; !filtered && i < rows.length; i++) {
      const at = level(rows[i]);
      const hide = at > closed;
      if (rows[i].hidden !== hide) rows[i].hidden = hide;
      if (!hide) closed = collapsed.has(rows[i].id) ? at : Infinity;
    }
    for (const row of rows) {
      if (row.hasAttribute("aria-expanded")) row.setAttribute("aria-expanded", String(filtered || !collapsed.has(row.id)));
    }
    if ($("wf-count")) $("wf-count").textContent = filtered ? shown + " of " + rows.length + " lines" : "";
    $("wf-collapse").textContent = collapsed.size ? "Expand all" : "Collapse all";
    if (!rows.some((r) => r.id === current && !r.hidden)) current = rows.find((r) => !r.hidden)?.id || "";
    reach();
  };
  // Tab reaches one row; arrows lead to the others.
  const reach = () => { for (const row of rows) row.tabIndex = row.id === current ? 0 : -1; };
  const focus = (row) => {
    if (!row) return;
    current = row.id;
    reach();
    row.focus({ preventScroll: true });
    row.scrollIntoView({ block: "nearest" });
  };
  const toggle = (row, close) => {
    if (!row.hasAttribute("aria-expanded")) return;
    if (close) collapsed.add(row.id); else collapsed.delete(row.id);
    layOut();
  };

  // Zoom.
  const draw = () => {
    zoom.by = Math.min(1000, Math.max(1, zoom.by));
    zoom.from = Math.min(1 - 1 / zoom.by, Math.max(0, zoom.from));
    if (zoom.by > 1 || root.style.length) { // a page that nobody zooms has no style attribute
      root.style.setProperty("--wf-zoom", zoom.by);
      root.style.setProperty("--wf-pan", zoom.by * zoom.from);
    }
    root.classList.toggle("wf-zoom-4", zoom.by >= 4);
    root.classList.toggle("wf-zoom-16", zoom.by >= 16);
    $("wf-out").disabled = $("wf-fit").disabled = zoom.by === 1;
    document.querySelector(".wf-pan").hidden = zoom.by === 1;
    $("wf-pan").value = zoom.by === 1 ? 0 : Math.round(1000 * zoom.from / (1 - 1 / zoom.by));
  };
  const scale = (factor, at = zoom.from + .5 / zoom.by) => {
    const share = (at - zoom.from) * zoom.by;
    zoom.by = Math.max(1, zoom.by * factor);
    zoom.from = at - share / zoom.by;
    draw();
  };
  const pan = (by) => { zoom.from += by / zoom.by; draw(); };
  const fit = () => { zoom.by = 1; zoom.from = 0; draw(); };

  // The panel.
  let asked = 0;
  const shownSpan = () => $("panel")?.dataset.span;
  const rowOf = (span) => span ? rows.find((r) => r.id === "row-" + span || r.id === "run-" + span || r.id === span) : undefined;
  const mark = () => {
    const row = rowOf(shownSpan());
    for (const r of document.querySelectorAll('.wf-row[aria-selected="true"]')) if (r !== row) r.removeAttribute("aria-selected");
    row?.setAttribute("aria-selected", "true");
    state = row?.dataset.state;
    return row;
  };
  let state; // of the span, when it was loaded
  const load = async () => {
    const mine = ++asked;
    const address = new URL(location.href);
    address.hash = "";
    address.searchParams.set("part", "panel");
    const answer = await fetch(address, { headers: { Accept: "text/html" } });
    if (!answer.ok) return location.reload(); // the page says what is wrong
    const html = await answer.text();
    if (mine !== asked) return;
    const box = document.createElement("template");
    box.innerHTML = html;
    const held = $("panel").contains(document.activeElement);
    clocks.forget($("panel"));
    $("panel").replaceWith(box.content.firstElementChild);
    mark();
    if (held) $("panel-title").focus({ preventScroll: true });
    clocks.watch($("panel"));
  };
  const open = async (link) => {
    const to = new URL(link, location.href), address = new URL(location.href);
    for (const name of ["span", "tab"]) {
      const value = to.searchParams.get(name);
      if (value) address.searchParams.set(name, value); else address.searchParams.delete(name);
    }
    address.hash = "";
    if (address.href !== location.href) history.pushState(null, "", address);
    try {
      await load();
    } catch {
      location.assign(link); // offline: the browser says so
      return;
    }
    say($("panel-title").textContent + (shownSpan() ? ", details opened" : ""));
    const beside = matchMedia("(min-width: 68rem)").matches;
    if (!beside && shownSpan()) $("panel").scrollIntoView({ block: "start" });
  };
  const within = (a) => { // a link to a span or a tab of this page
    if (!$("panel")) return false;
    const to = new URL(a.href, location.href);
    const rest = (u) => { const q = new URLSearchParams(u.search); for (const n of ["span", "tab", "q", "kind", "errors", "after"]) q.delete(n); return u.pathname + "?" + q; };
    return a.target === "" && !a.hasAttribute("download") && rest(to) === rest(new URL(location.href)) &&
      (to.searchParams.has("span") || to.searchParams.has("tab") || Boolean(a.closest("#panel .tabs, .span-close"))) &&
      (to.searchParams.get("after") || "") === (new URLSearchParams(location.search).get("after") || "");
  };
  document.addEventListener("click", (e) => {
    if (e.defaultPrevented || e.button || e.ctrlKey || e.metaKey || e.shiftKey || e.altKey) return;
    const link = e.target.closest("a[href]");
    if (link) {
      if (!within(link)) return;
      e.preventDefault();
      const row = link.closest(".wf-row");
      if (row) focus(row);
      open(link.href);
      return;
    }
    const row = e.target.closest(".wf-row");
    if (!row || dragged || !getSelection().isCollapsed) return;
    focus(row);
    const name = row.querySelector(".wf-name"), box = name.getBoundingClientRect();
    const pad = parseFloat(getComputedStyle(name).paddingInlineStart);
    if (row.hasAttribute("aria-expanded") && e.clientX < box.left + pad + 16) toggle(row, !collapsed.has(row.id));
    else row.querySelector("a")?.click();
  });
  if ($("panel")) addEventListener("popstate", () => load().catch(() => location.reload()));

  // Keys of the treegrid, as the ARIA Authoring Practices have them.
  document.addEventListener("keydown", (e) => {
    const row = document.activeElement?.closest(".wf-row");
    if (!row || e.ctrlKey || e.metaKey || e.altKey || e.isComposing) return;
    const shown = rows.filter((r) => !r.hidden), at = shown.indexOf(row);
    const page = Math.max(1, Math.floor(innerHeight / 2 / row.offsetHeight));
    const does = {
      ArrowDown: () => focus(shown[at + 1]),
      ArrowUp: () => focus(shown[at - 1]),
      PageDown: () => focus(shown[Math.min(shown.length - 1, at + page)]),
      PageUp: () => focus(shown[Math.max(0, at - page)]),
      Home: () => focus(shown[0]),
      End: () => focus(shown[shown.length - 1]),
      ArrowRight: () => {
        if (e.shiftKey) return pan(.25);
        if (collapsed.has(row.id)) return toggle(row, false);
        if (row.hasAttribute("aria-expanded")) focus(shown[at + 1]);
      },
      ArrowLeft: () => {
        if (e.shiftKey) return pan(-.25);
        if (row.getAttribute("aria-expanded") === "true") return toggle(row, true);
        for (let i = at - 1; i >= 0; i--) if (level(shown[i]) < level(row)) return focus(shown[i]);
      },
      Enter: () => { if (document.activeElement === row) row.querySelector("a")?.click(); else return false; },
      "+": () => scale(2), "=": () => scale(2), "-": () => scale(.5), "0": fit,
    }[e.key];
    if (does && does() !== false) e.preventDefault();
  });

  // Drag over the bars: into that period.
  let drag = null, dragged = false;
  document.addEventListener("pointerdown", (e) => {
    dragged = false;
    const time = e.target.closest("#wf-grid .wf-time");
    if (!time || e.button || e.pointerType === "touch") return;
    const box = time.getBoundingClientRect();
    drag = { box, from: e.clientX };
  });
  const share = (x) => Math.min(1, Math.max(0, (x - drag.box.left) / drag.box.width));
  document.addEventListener("pointermove", (e) => {
    if (!drag || Math.abs(e.clientX - drag.from) < 5) return;
    dragged = true;
    let select = document.querySelector(".wf-select");
    if (!select) {
      select = document.createElement("span");
      select.className = "wf-select";
      document.querySelector(".wf-back .wf-time").append(select);
    }
    const a = share(drag.from), b = share(e.clientX);
    select.style.left = 100 * Math.min(a, b) + "%";
    select.style.width = 100 * Math.abs(a - b) + "%";
  });
  document.addEventListener("pointerup", (e) => {
    if (drag && dragged) {
      const a = share(drag.from), b = share(e.clientX);
      const at = zoom.from + Math.min(a, b) / zoom.by;
      zoom.by /= Math.max(Math.abs(a - b), .001);
      zoom.from = at;
      draw();
    }
    document.querySelector(".wf-select")?.remove();
    drag = null;
  });

  // Tools.
  document.addEventListener("click", (e) => {
    const alone = rows.filter((r) => level(r) === 1).length === 1; // the only root stays open
    switch (e.target.id) {
      case "wf-collapse":
        if (collapsed.size) collapsed.clear();
        else for (const row of rows) if (row.hasAttribute("aria-expanded") && !(alone && level(row) === 1)) collapsed.add(row.id);
        return layOut();
      case "wf-in": return scale(2);
      case "wf-out": return scale(.5);
      case "wf-fit": return fit();
    }
  });
  let later = 0;
  document.addEventListener("input", (e) => {
    if (e.target.id === "wf-pan") {
      zoom.from = e.target.value / 1000 * (1 - 1 / zoom.by);
      return draw();
    }
    const form = e.target.closest(".wf-tools");
    if (!form) return;
    clearTimeout(later);
    later = setTimeout(() => {
      layOut();
      const address = new URL(location.href), w = wanted();
      for (const [name, value] of [["q", w.text && form.q.value.trim()], ["kind", w.kind], ["errors", w.errors && "1"]]) {
        if (value) address.searchParams.set(name, value); else address.searchParams.delete(name);
      }
      history.replaceState(null, "", address);
    }, 120);
  });
  document.addEventListener("submit", (e) => { if (e.target.matches(".wf-tools")) e.preventDefault(); });

  const begin = () => {
    rows = [...document.querySelectorAll("#wf-grid .wf-row")];
    for (const row of rows) row.querySelector("a").tabIndex = -1;
    const buttons = document.querySelector(".wf-buttons");
    if (!buttons) return;
    buttons.hidden = false;
    for (const button of document.querySelectorAll(".wf-go")) button.hidden = true;
    layOut();
    draw();
  };
  document.addEventListener("part", (e) => {
    if (e.detail.id !== "view") return;
    const was = state;
    begin();
    mark();
    if (shownSpan() && state !== was) load().catch(() => {}); // the stream says when the server is away
  });
  const errors = document.querySelector(".wf-tools [name=errors]");
  if (location.hash === "#errors" && errors) errors.checked = true;
  begin();
  mark();
})();
