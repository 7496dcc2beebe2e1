"use strict";
// The clocks of a page: they show moments in the chosen zone and count by the server's time. They stop when the page is
// disconnected or paused.
const clocks = (() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const page = document.body.dataset;
  const put = (element, text) => { if (element.textContent !== text) element.textContent = text; };

  // A clock of this computer that is far from the server's is corrected.
  let skew = Number(page.now) - Date.now(), stopped = null, paused = false;
  const now = () => stopped ?? Date.now() + (Math.abs(skew) > 5000 ? skew : 0);

  // The zone: that of this computer, or UTC. The server reads the cookie.
  const local = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
  const setCookie = (value) => { document.cookie = page.zoneCookie + "=" + value + "; path=/; max-age=31536000; samesite=strict"; };
  const cookie = document.cookie.split("; ").find((c) => c.startsWith(page.zoneCookie + "="))?.slice(page.zoneCookie.length + 1);
  let utc = cookie === "UTC" && local !== "UTC";
  if (cookie !== (utc ? "UTC" : local)) setCookie(local);
  const zoneName = () => utc ? "UTC" : "local (" + local + ")";
  const shifted = (t) => new Date(t.getTime() - (utc ? 0 : t.getTimezoneOffset() * 60000)); // its UTC fields are those of the zone
  let long = null;
  const title = (t) => {
    long ||= new Intl.DateTimeFormat("en-GB", { dateStyle: "full", timeStyle: "long", timeZone: utc ? "UTC" : undefined });
    return long.format(t);
  };

  const months = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
  const two = (n) => String(n).padStart(2, "0");
  const moment = (t) => {
    const then = shifted(t), today = shifted(new Date(now()));
    const clock = two(then.getUTCHours()) + ":" + two(then.getUTCMinutes()) + ":" + two(then.getUTCSeconds());
    if (then.toISOString().slice(0, 10) === today.toISOString().slice(0, 10)) return clock;
    const day = then.getUTCDate() + " " + months[then.getUTCMonth()];
    return day + (then.getUTCFullYear() === today.getUTCFullYear() ? "" : " " + then.getUTCFullYear()) + " " + clock;
  };
  const forms = {
    since: (t) => human.clock(now() - t), ago: (t) => human.ago(now() - t), until: (t) => human.until(t - now()),
    left: (t) => human.left(t - now()), next: (t) => t > now() ? moment(t) : "due", at: moment,
  };
  const tick = (element) => {
    const t = new Date(element.dateTime);
    if (Number.isNaN(t.getTime())) return;
    const form = forms[Object.keys(forms).find((name) => element.classList.contains(name))];
    if (!element.title) element.title = title(t);
    if (form) put(element, form(t));
  };

  const seen = new Set(); // those on the screen
  const onScreen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting && target.isConnected) { seen.add(target); tick(target); } else seen.delete(target);
    }
  });
  const watch = (root) => { for (const t of all("time", root)) { tick(t); onScreen.observe(t); } };
  const forget = (root) => { for (const t of all("time", root)) if (seen.delete(t)) onScreen.unobserve(t); };
  const tickAll = () => { for (const t of seen) tick(t); };

  // Typed times are in the chosen zone; the address has the absolute time, so it means the same to everybody.
  const field = "input[type=datetime-local]";
  const typed = (t) => shifted(t).toISOString().slice(0, 16);
  const showZone = () => {
    for (const name of all(".zone-name")) put(name, zoneName());
    for (const input of all(field + "[data-instant]")) {
      const untouched = input.value === input.defaultValue;
      input.defaultValue = typed(new Date(input.dataset.instant));
      if (untouched) input.value = input.defaultValue;
    }
  };
  document.addEventListener("formdata", (e) => {
    for (const input of all(field, e.target)) {
      const t = new Date(input.value + (utc ? "Z" : ""));
      if (input.value && !Number.isNaN(t.getTime())) e.formData.set(input.name, t.toISOString().slice(0, 16) + "Z");
    }
  });
  const choice = document.getElementById("zone");
  document.getElementById("zone-said").hidden = true;
  document.getElementById("zone-choice").hidden = false;
  put(choice.options[0], "local (" + local + ")");
  choice.value = utc ? "utc" : "local";
  choice.addEventListener("change", () => {
    utc = choice.value === "utc";
    setCookie(utc ? "UTC" : local);
    long = null;
    for (const t of all("time")) { t.title = ""; tick(t); }
    showZone();
  });

  showZone();
  watch(document);
  setInterval(() => { if (stopped === null && !paused && !document.hidden) tickAll(); }, 1000);
  return {
    watch, forget, now,
    pause(on) { paused = on; if (!on) tickAll(); },
    heard(serverTime) { skew = serverTime - Date.now(); },
    stop(at) { stopped = at; for (const t of all("time")) tick(t); }, // null: go on
    short: (t) => typed(new Date(t)).slice(11),
  };
})();
