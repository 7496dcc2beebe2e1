"use strict";
// The Engine Room in a browser: parts that change are morphed in, clocks tick, keys lead about. Without it every page
// can be read and every action pulled.
(() => {
  const $ = (id) => document.getElementById(id);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const page = document.body.dataset;
  const store = {
    get(where, key) { try { return where.getItem("lanekeeper-" + key); } catch { return null; } },
    set(where, key, value) {
      try {
        if (value === null) where.removeItem("lanekeeper-" + key);
        else where.setItem("lanekeeper-" + key, value);
      } catch { /* storage is off: the choice holds for this page */ }
    },
  };
  const say = (text) => { $("said").textContent = text; };
  const put = (element, text) => { if (element.textContent !== text) element.textContent = text; };

  // Theme: as the system has it, light, dark.
  const themes = ["system", "light", "dark"];
  const root = document.documentElement;
  const theme = () => root.dataset.theme || "system";
  const showTheme = () => {
    put($("theme"), "◐ " + theme());
    $("theme").setAttribute("aria-label", "Theme: " + theme());
  };
  $("theme").hidden = false;
  showTheme();
  $("theme").addEventListener("click", () => {
    const next = themes[(themes.indexOf(theme()) + 1) % themes.length];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    store.set(localStorage, "theme", next === "system" ? null : next);
    showTheme();
  });

  // Live: what comes is kept by part, and morphed in unless the reader paused, or selects text there.
  const state = $("live-state");
  let paused = store.get(sessionStorage, "paused") === "yes";
  let seen = page.seen, source = null, timer = 0, standing = "waiting", ended = false;
  let heard = Date.now(), begun = heard, broken = 0, rejections = 0, dead = false, asking = false, resting = false, reached = true, loggedOut = false; // moments of this computer's clock
  const pending = new Map();
  const unsent = document.createElement("p");
  unsent.className = "tone-bad";
  unsent.setAttribute("role", "alert");

  const words = { live: "Live", unread: "Data unreadable", paused: "Paused", waiting: "Connecting", ended: "Not live" };
  const show = () => {
    if (!state) return;
    const is = standing !== "live" ? standing : paused ? "paused" : document.querySelector(".part.trouble") ? "unread" : "live";
    state.dataset.state = is;
    if (!ended) put(state, words[is]);
    const n = pending.size;
    const button = $("live-pause");
    button.hidden = ended;
    button.setAttribute("aria-pressed", String(paused));
    put(button, paused ? "Resume" + (n ? " (" + n + (n === 1 ? " update" : " updates") + " waiting)" : "") : "Pause updates");
  };
  const end = (text, link, href) => {
    ended = true;
    standing = "ended";
    clocks.stop(clocks.now());
    if (source) source.close();
    put(state, text + " ");
    const a = document.createElement("a");
    a.href = href;
    a.textContent = link;
    state.append(a);
    show();
  };
  const here = () => location.pathname + location.search;
  const expire = () => {
    loggedOut = true;
    end("The login has ended.", "Log in again", "/login?next=" + encodeURIComponent(here()));
  };

  const typed = (e) => (e.matches("input,textarea") && e.value !== e.defaultValue) ||
    (e.matches("input[type=checkbox],input[type=radio]") && e.checked !== e.defaultChecked) ||
    (e.matches("select") && [...e.options].some((o) => o.selected !== o.defaultSelected) && e === document.activeElement);
  const keep = {
    beforeNodeMorphed(old, fresh) {
      if (old.nodeType !== 1) return true;
      if (fresh.dataset && "same" in fresh.dataset) return false; // a row that did not change
      if (old.localName === "time" && fresh.localName === "time") {
        return old.getAttribute("datetime") !== fresh.getAttribute("datetime") || old.className !== fresh.className;
      }
      return !(old.matches("details.action[open],[data-keep]") || typed(old));
    },
    beforeAttributeUpdated(name, node) {
      return !(name === "open" && node.matches("details,dialog")) && name !== "tabindex";
    },
    afterNodeAdded(node) {
      if (node.nodeType === 1 && node.matches("tr[id],[data-row]")) node.classList.add("fresh");
    },
  };
  const selectsIn = (part) => {
    const s = getSelection();
    return s && !s.isCollapsed && part.contains(s.anchorNode);
  };
  // A button must not move away under a pointer that is about to decide: its part waits, up to ten seconds of rest.
  let pointed = -Infinity, waits = 0;
  const aims = (part) => performance.now() - pointed < 10000 && part.querySelector("form.decide:hover");
  const parsed = (html) => {
    const t = document.createElement("template");
    t.innerHTML = html;
    return t.content.firstElementChild;
  };
  const reload = () => { // get all of each part
    seen = "";
    drop();
    connect();
  };
  const morph = (part, html) => {
    const fresh = parsed(html);
    if (!fresh) return;
    if (all("[data-same]", fresh).some((row) => !$(row.id))) return reload(); // it is not what this page has
    const had = part.contains(document.activeElement) ? document.activeElement : null;
    clocks.forget(part);
    Idiomorph.morph(part, fresh, { morphStyle: "outerHTML", ignoreActiveValue: true, callbacks: keep });
    const after = $(fresh.id || part.id) || part;
    clocks.watch(after);
    if (had && !had.isConnected) { // what had the focus is gone: its part has it
      after.tabIndex = -1;
      after.focus({ preventScroll: true });
    }
    document.dispatchEvent(new CustomEvent("part", { detail: after }));
  };
  const news = (part, html) => { // how many rows came while the part stands still
    const rows = all("[data-row]", parsed(html) || part);
    if (!rows.length) return;
    const has = new Set(all("[data-row]", part).map((r) => r.dataset.row));
    const n = rows.filter((r) => !has.has(r.dataset.row)).length;
    const title = part.querySelector("h2");
    let badge = part.querySelector(".news");
    if (!badge && n && title) {
      badge = document.createElement("span");
      badge.className = "news";
      title.append(badge);
    }
    if (badge) put(badge, n + (n === rows.length ? "+ new" : " new"));
  };
  const apply = () => {
    for (const [id, { html, incomplete }] of pending) {
      const part = $(id);
      if (!part || !html) pending.delete(id);
      else if (paused) news(part, html);
      else if (aims(part)) { clearTimeout(waits); waits = setTimeout(apply, 250); }
      else if (!selectsIn(part)) {
        pending.delete(id);
        if (incomplete) reload();
        else morph(part, html);
      }
    }
    show();
  };

  // A stream that is silent is as good as none: a ping comes every 3 s. While nobody answers, the page says since when it
  // is not confirmed, and its clocks stand at that moment.
  const silence = 8000, outage = 2000;
  const hear = (serverTime) => {
    heard = Date.now();
    broken = 0;
    if (serverTime) clocks.heard(Number(serverTime));
    if (dead) showDead(false);
    unsent.remove();
  };
  const showDead = (is) => {
    dead = is;
    clocks.stop(dead ? clocks.now() - (Date.now() - heard) : null);
    put($("disconnected"), dead ? "Disconnected since " + clocks.short(clocks.now()) : "");
    document.body.classList.toggle("is-disconnected", dead);
    document.dispatchEvent(new CustomEvent("connection", { detail: { dead } }));
  };
  const judge = () => {
    if (ended || resting) return;
    const now = Date.now(), silent = source && now - Math.max(heard, begun) > silence;
    if (!dead && (silent || broken && now - broken > outage)) showDead(true);
    if (silent) {
      broken ||= now;
      drop();
      ask();
    }
  };
  const drop = () => {
    clearTimeout(timer);
    if (source) source.close();
    source = null;
    if (ended) return;
    standing = "waiting";
    show();
  };
  const connect = () => {
    clearTimeout(timer);
    if (ended || source || resting) return;
    begun = Date.now();
    const mine = source = new EventSource(page.live + (page.live.includes("?") ? "&" : "?") + "seen=" + encodeURIComponent(seen));
    mine.addEventListener("hello", (e) => {
      rejections = 0;
      standing = "live";
      hear();
      show();
      if (e.data !== page.build) end("The server is another version now.", "Load the page again", here());
    });
    mine.addEventListener("ping", (e) => hear(e.data));
    mine.addEventListener("part", (e) => {
      hear();
      const { id, html } = JSON.parse(e.data);
      seen = e.lastEventId;
      // An update of rows lacks those of the update that it replaces.
      pending.set(id, { html, incomplete: pending.has(id) && html.includes("data-same") });
      apply();
    });
    mine.addEventListener("expired", expire);
    mine.addEventListener("error", () => {
      if (ended || source !== mine) return;
      drop();
      broken ||= Date.now();
      ask();
    });
  };
  const ask = async () => { // a stream that is refused does not say why: the same address does
    clearTimeout(timer);
    if (asking || ended || source || resting) return;
    asking = true;
    reached = false;
    try {
      const answer = await fetch(page.live, { method: "HEAD", cache: "no-store", signal: AbortSignal.timeout(4000) });
      if (answer.status === 401) return expire();
      if (answer.status === 403) return end("You may no longer open this page.", "Overview", "/");
      if (answer.status === 404) return end("This page is no longer there.", "Overview", "/");
      reached = answer.ok;
    } catch { /* nobody answers: the timer tries again */ } finally { asking = false; }
    if (reached) timer = setTimeout(connect, rejections ? Math.min(30000, 500 * 2 ** rejections) : 250);
    else timer = setTimeout(ask, 1000);
    if (reached) rejections++; // it may refuse the stream nevertheless, for too many viewers
  };
  const pause = () => {
    paused = !paused;
    store.set(sessionStorage, "paused", paused ? "yes" : null);
    clocks.pause(paused);
    apply();
  };
  if (state) {
    $("live-pause").addEventListener("click", pause);
    document.addEventListener("selectionchange", () => { if (pending.size && !paused) apply(); });
    document.addEventListener("pointermove", (e) => { pointed = e.timeStamp; }, { passive: true });
    // Of the pages that nobody sees, one keeps its stream for the titles and notifications of all: a browser has few
    // connections to a server.
    let away = 0, waiting = null, release = null;
    const rest = () => {
      resting = true;
      drop();
      waiting = new AbortController();
      navigator.locks?.request("lanekeeper-watch", { signal: waiting.signal }, () => {
        resting = false;
        connect();
        return new Promise((done) => { release = done; });
      }).catch(() => { /* the page is seen again */ });
    };
    const wake = () => {
      resting = false;
      waiting?.abort();
      release?.();
      if (broken) ask();
      else connect();
    };
    document.addEventListener("visibilitychange", () => {
      clearTimeout(away);
      if (document.hidden) away = setTimeout(rest, 20000);
      else wake();
    });
    addEventListener("pagehide", () => { resting = true; drop(); });
    addEventListener("pageshow", (e) => { if (e.persisted) wake(); });
    addEventListener("offline", () => { drop(); broken ||= Date.now(); ask(); });
    addEventListener("online", ask);
    setInterval(judge, 500);
    clocks.pause(paused);
    show();
    connect();
  }

  // Copy buttons.
  const copied = (text) => {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const area = document.createElement("textarea"); // an address without TLS has no clipboard
    area.value = text;
    document.body.append(area);
    area.select();
    const ok = document.execCommand("copy");
    area.remove();
    return ok ? Promise.resolve() : Promise.reject(new Error("no clipboard"));
  };
  document.addEventListener("click", async (e) => {
    const button = e.target.closest("button.copy");
    if (!button) return;
    const word = button.dataset.word ||= button.textContent;
    try {
      await copied(button.dataset.copy);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not copied";
    }
    say(button.textContent);
    setTimeout(() => { button.textContent = word; }, 1500);
  });

  // Levers: what is sent is sent once, Escape closes, and the page comes back where it was. A long form that is refused
  // has again what was written in it.
  const fields = (form) => all("input[name]:not([type=hidden]),textarea[name]", form);
  const written = (field) => field.type === "checkbox" ? field.checked : field.value;
  const [refused, values] = JSON.parse(store.get(sessionStorage, "written") || "[]");
  store.set(sessionStorage, "written", null);
  if (refused && document.querySelector(".flash-bad")) {
    for (const form of all("form.stacked").filter((f) => f.getAttribute("action") === refused)) {
      fields(form).forEach((field, i) => { field[field.type === "checkbox" ? "checked" : "value"] = values[i]; });
    }
  }
  document.addEventListener("submit", async (e) => {
    const form = e.target;
    if (form.method !== "post") return;
    if (loggedOut || dead && !reached) { // the browser would leave the page for its error page, or for the login
      e.preventDefault();
      if (loggedOut && await fetch(page.live, { method: "HEAD" }).then((answer) => answer.ok, () => false)) {
        [loggedOut, reached] = [false, true]; // in another tab, there is a new login
        return form.requestSubmit(e.submitter);
      }
      unsent.textContent = "Not sent. " + (loggedOut ? "The login has ended" : $("disconnected").textContent) + ".";
      return form.append(unsent);
    }
    if (form.dataset.sent) return e.preventDefault();
    form.dataset.sent = "yes";
    store.set(sessionStorage, "scroll", here() + " " + scrollY);
    if (form.matches(".stacked")) store.set(sessionStorage, "written", JSON.stringify([form.getAttribute("action"), fields(form).map(written)]));
    setTimeout(() => { for (const b of all("button", form)) b.disabled = true; });
  });
  addEventListener("pageshow", () => {
    for (const form of all("form[data-sent]")) {
      delete form.dataset.sent;
      for (const b of all("button", form)) b.disabled = false;
    }
  });
  const [at, y] = (store.get(sessionStorage, "scroll") || "").split(" ");
  store.set(sessionStorage, "scroll", null);
  if (at === here() && !location.hash) scrollTo(0, Number(y));
  document.addEventListener("toggle", (e) => {
    if (e.target.matches("details.action[open]")) e.target.querySelector("form :is(input:not([type=hidden]),textarea,select,button)")?.focus();
  }, true);

  // Keys. Who would rather have none turns them off in the dialog that ? opens.
  const help = $("help"), on = $("keys-on");
  on.checked = store.get(localStorage, "keys") !== "off";
  on.addEventListener("change", () => store.set(localStorage, "keys", on.checked ? null : "off"));
  $("help-open").hidden = false;
  $("help-open").addEventListener("click", () => help.showModal());
  const rows = () => all("main tbody tr, main li[data-row]").filter((r) => r.offsetParent !== null);
  const step = (by) => {
    const list = rows();
    const from = list.indexOf(document.activeElement.closest("tbody tr, li[data-row]"));
    const to = list[from < 0 ? (by > 0 ? 0 : list.length - 1) : Math.min(list.length - 1, Math.max(0, from + by))];
    if (!to) return;
    to.tabIndex = -1;
    to.focus();
    to.scrollIntoView({ block: "nearest" });
  };
  const plainKeys = {
    "?": () => help.showModal(),
    "/": () => $("main").querySelector(".filters :is(input:not([type=hidden]),select)")?.focus(),
    j: () => step(1),
    k: () => step(-1),
    p: () => { if (state && !ended) pause(); },
  };
  let leading = 0; // when g was pressed
  document.addEventListener("keydown", (e) => {
    const target = document.activeElement || document.body;
    if (e.key === "Escape" && !help.open) {
      const action = target.closest("details.action[open]");
      if (action) { action.open = false; action.querySelector("summary").focus(); }
      return;
    }
    if (e.key === "Enter" && target.matches("tbody tr, li[data-row]")) return target.querySelector("a[href]")?.click();
    if (!on.checked || help.open || e.ctrlKey || e.metaKey || e.altKey || e.isComposing) return;
    if (target.matches("input:not([type=checkbox],[type=radio]),textarea,select,[contenteditable]")) return;
    if (Date.now() - leading < 1500) {
      leading = 0;
      const link = all("nav a[data-key]").find((a) => a.dataset.key === e.key);
      if (link) { e.preventDefault(); link.click(); }
      return;
    }
    if (e.key === "g") { leading = Date.now(); return; }
    const does = plainKeys[e.key];
    if (does) { e.preventDefault(); does(); }
  });
})();
