"use strict";
// The title and the icon show what waits for a person, and whether the page is connected. Notifications are asked for by
// a button; one tab among all shows each.
(() => {
  const icon = document.getElementById("icon"), button = document.getElementById("notify");
  const title = document.title.replace(/^\(\d+\+?\) /, "");
  const channel = "BroadcastChannel" in window ? new BroadcastChannel("lanekeeper") : null;
  let dead = false, count = "", asked = "", newest = null;

  const show = () => {
    for (const e of document.querySelectorAll("span[data-asked]")) if (e.textContent !== asked) e.textContent = asked;
    document.title = (dead ? "Disconnected · " : "") + (count ? "(" + count + ") " : "") + title;
    const href = icon.dataset[dead ? "dead" : count ? "waits" : "none"];
    if (icon.getAttribute("href") !== href) icon.setAttribute("href", href);
  };
  const get = (key) => { try { return localStorage.getItem("lanekeeper-" + key); } catch { return null; } };
  const set = (key, value) => { try { localStorage.setItem("lanekeeper-" + key, value); } catch { /* storage is off */ } };
  const can = "Notification" in window;
  const wanted = () => can && Notification.permission === "granted" && get("notify") === "on";

  const notify = (id, skill) => { // ids are in order of time: the newest that was announced is kept for all tabs
    if (!wanted() || (get("announced") || "") >= id) return;
    set("announced", id);
    const shown = new Notification("Approval requested: " + skill, { tag: "lanekeeper-" + id, icon: icon.dataset.waits });
    shown.onclick = () => { window.focus(); location.href = "/approvals/" + encodeURIComponent(id); };
  };
  const take = (now, tell) => {
    const fresh = newest !== null && now.newest > newest;
    if (newest === null || fresh) newest = now.newest;
    count = now.count;
    asked = now.asked;
    show();
    if (tell && fresh) {
      if (navigator.locks) navigator.locks.request("lanekeeper-notify", () => notify(now.newest, now.skill));
      else notify(now.newest, now.skill);
    }
  };
  const read = (tell) => {
    const waits = document.getElementById("waits");
    if (!waits || waits.dataset.count === undefined) return;
    const { count, asked, newest, skill } = waits.dataset;
    take({ count, asked, newest, skill }, tell);
    if (channel) channel.postMessage({ count, asked, newest, skill });
  };
  if (channel) channel.addEventListener("message", (e) => take(e.data, false)); // for tabs without a stream
  document.addEventListener("part", (e) => { if (e.detail.id === "waits") read(true); });
  document.addEventListener("connection", (e) => { dead = e.detail.dead; show(); });
  read(false);

  if (!can) return;
  const showButton = () => {
    button.hidden = Notification.permission === "denied";
    button.setAttribute("aria-pressed", String(wanted()));
  };
  button.addEventListener("click", async () => {
    if (wanted()) set("notify", "off");
    else if (await Notification.requestPermission() === "granted") {
      set("notify", "on");
      set("announced", newest || "");
    }
    showButton();
  });
  showButton();
})();
