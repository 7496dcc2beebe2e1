"use strict";
// Find: Ctrl-K opens a dialog with the results of /find as they are typed, the arrow keys choose one. Saved views are
// addresses that this browser keeps. Without it /find is a page, and the filters are in the address all the same.
(() => {
  const $ = (id) => document.getElementById(id);
  const read = (key, none) => { try { return JSON.parse(localStorage.getItem("lanekeeper-" + key)) ?? none; } catch { return none; } };
  const write = (key, value) => { try { localStorage.setItem("lanekeeper-" + key, JSON.stringify(value)); } catch { /* storage is off */ } };
  const make = (name, attributes, ...children) => {
    const e = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
    e.append(...children);
    return e;
  };

  // Pages of one thing, the latest first.
  const recent = read("recent", []).filter((r) => Array.isArray(r) && String(r[0]).startsWith("/"));
  if (/^\/[^/]+\/./.test(location.pathname)) {
    const title = document.querySelector("h1")?.textContent || location.pathname;
    write("recent", [[location.pathname, title], ...recent.filter((r) => r[0] !== location.pathname)].slice(0, 8));
  }

  const dialog = $("find"), input = $("find-q"), list = $("find-list");
  const options = () => [...list.querySelectorAll("a[role=option]")];
  let chosen = -1, timer = 0, asking = null, shown = null;
  const choose = (n) => {
    const all = options();
    all[chosen]?.setAttribute("aria-selected", "false");
    chosen = all.length ? (n + all.length) % all.length : -1;
    if (chosen < 0) return input.removeAttribute("aria-activedescendant");
    all[chosen].setAttribute("aria-selected", "true");
    all[chosen].scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", all[chosen].id);
  };
  const before = () => { // what was looked at last, before what is latest
    const mine = recent.filter((r) => r[0] !== location.pathname);
    if (!mine.length) return "";
    const word = make("div", { class: "hits-word", role: "presentation", id: "find-mine" }, "Visited last");
    return make("div", { class: "hits-group", role: "group", "aria-labelledby": "find-mine" }, word,
      ...mine.map(([href, title], i) => make("a", { role: "option", id: "find-mine-" + i, "aria-selected": "false", tabindex: "-1", href },
        make("span", { class: "hit-title" }, title), make("span", { class: "mono muted hit-path" }, href))));
  };
  // Resolves to false when a later question replaced this one.
  const ask = async () => {
    const text = input.value.trim();
    if (text === shown) return true;
    asking?.abort();
    asking = new AbortController();
    let html, trouble = "The server does not answer.";
    try {
      const answer = await fetch("/find/results?q=" + encodeURIComponent(text), { signal: asking.signal, cache: "no-store" });
      trouble = { 401: "The login has ended.", 403: "You may no longer search." }[answer.status] || trouble;
      if (!answer.ok) throw new Error(answer.statusText);
      html = await answer.text();
    } catch (e) {
      if (e.name === "AbortError") return false;
      html = "";
    }
    shown = text;
    const t = document.createElement("template");
    t.innerHTML = html;
    if (html) list.replaceChildren(text ? "" : before(), t.content);
    else list.replaceChildren(make("div", { role: "option", "aria-disabled": "true", "aria-selected": "false", class: "empty" }, trouble));
    input.setAttribute("aria-expanded", "true");
    chosen = -1;
    if (text) choose(0);
    else input.removeAttribute("aria-activedescendant");
    $("said").textContent = text ? options().length + (options().length === 1 ? " result" : " results") : "";
    return true;
  };
  const open = () => {
    if (dialog.open || !$("find-open").hasAttribute("href")) return;
    dialog.showModal();
    input.select();
    shown = null;
    ask();
  };
  $("find-open").addEventListener("click", (e) => {
    if (e.ctrlKey || e.metaKey || e.shiftKey) return;
    e.preventDefault();
    open();
  });
  for (const k of $("find-open").querySelectorAll("kbd")) {
    k.hidden = false;
    if (/Mac|iP/.test(navigator.platform)) k.textContent = "⌘ K";
  }
  document.addEventListener("keydown", (e) => {
    if ((e.ctrlKey || e.metaKey) && !e.altKey && !e.shiftKey && e.key.toLowerCase() === "k") {
      e.preventDefault();
      open();
    }
  });
  input.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(ask, 120); });
  input.addEventListener("keydown", (e) => {
    if (e.isComposing || e.keyCode === 229) return; // as in operate.js
    const all = options();
    if (e.key === "ArrowDown") choose(chosen + 1);
    else if (e.key === "ArrowUp") choose(chosen < 0 ? all.length - 1 : chosen - 1);
    else if (e.key === "Escape") dialog.close(); // once, also with a text
    else if (e.key === "Enter" && (all[chosen] || input.value.trim() !== shown)) {
      clearTimeout(timer); // also before the results of what was typed last are here
      ask().then((latest) => { // not for the first Enter of two: the list may still be that of the text before
        if (!latest) return;
        if (options()[chosen]) options()[chosen].click();
        else input.form.submit();
      });
    } else return;
    e.preventDefault();
  });
  list.addEventListener("click", (e) => { if (e.target.closest("a[href]")) setTimeout(() => dialog.close()); });
  dialog.addEventListener("click", (e) => { if (e.target === dialog) dialog.close(); });

  // Saved views: the address has all filters, so a view is a named address of this page.
  for (const place of document.querySelectorAll("[data-views]")) {
    const page = location.pathname, key = "views";
    const mine = () => read(key, []).filter((v) => String(v.href).split("?")[0] === page);
    const others = () => read(key, []).filter((v) => String(v.href).split("?")[0] !== page);
    const here = () => {
      const q = new URLSearchParams(location.search);
      for (const [name, value] of [...q]) if (!value || ["before", "after", "cursor", "row"].includes(name)) q.delete(name);
      return q.size ? page + "?" + q : page;
    };
    const draw = () => {
      const all = mine();
      const known = all.some((v) => v.href === here());
      place.hidden = !all.length && here() === page;
      place.replaceChildren(...all.map((v) => {
        const link = make("a", { href: v.href }, v.name);
        if (v.href === here()) link.setAttribute("aria-current", "page");
        const remove = make("button", { type: "button", class: "quiet", "aria-label": "Delete view " + v.name }, "×");
        remove.addEventListener("click", () => { write(key, [...others(), ...mine().filter((o) => o.href !== v.href)]); draw(); });
        return make("span", { class: "view" }, link, remove);
      }));
      if (here() === page || known) return;
      const save = make("button", { type: "button", class: "quiet view-save" }, "Save view");
      save.addEventListener("click", () => {
        const name = make("input", { "aria-label": "Name of the view", maxlength: "40", value: [...new URLSearchParams(here().split("?")[1]).values()].join(", ").slice(0, 40) });
        const keep = make("button", { type: "submit", class: "plain" }, "Save");
        const form = make("form", { class: "view-form" }, name, keep);
        form.addEventListener("submit", (e) => {
          e.preventDefault();
          const view = { name: name.value.trim() || "View", href: here() };
          write(key, [...others(), ...mine().filter((v) => v.href !== view.href), view]);
          draw();
          $("said").textContent = "View saved";
          place.querySelector("[aria-current]")?.focus();
        });
        save.replaceWith(form);
        name.select();
        name.focus();
      });
      place.append(save);
    };
    draw();
  }

  // The sheet of pages on a phone closes with Escape and by a tap beside it.
  const more = document.querySelector(".thumb-more");
  document.addEventListener("click", (e) => { if (more.open && !more.contains(e.target)) more.open = false; });
  more.addEventListener("keydown", (e) => {
    if (e.key !== "Escape" || !more.open) return;
    more.open = false;
    more.querySelector("summary").focus();
  });
})();
