"use strict";
// The console: what is said to the agent goes to the API with the login of the page, and the answer is shown as it comes.
// A turn whose connection broke is looked for, and shown to its end. Everything that came from elsewhere is put in as text.
(() => {
  const $ = (id) => document.getElementById(id);
  const form = $("say"), box = $("message"), log = $("transcript"), state = $("say-state");
  const send = $("send"), stop = $("stop"), watch = $("watch"), who = $("agent");
  if (!form || !log) return;
  let session = $("session-id").value, turn = null, busy = false, watching = null, leaving = false;

  const tell = (text) => { if (state.textContent !== text) state.textContent = text; };
  const make = (name, className, text) => {
    const e = document.createElement(name);
    if (className) e.className = className;
    if (text !== undefined) e.textContent = visible(text);
    return e;
  };
  // As the server does it: characters that would change how the text around them reads are written out.
  const visible = (text) => String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]/g,
    (c) => "⟨U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟩");
  const shown = (value) => {
    if (value === undefined || value === null) return "";
    const text = typeof value === "string" ? value : JSON.stringify(value, null, 2);
    return text.length > 4000 ? text.slice(0, 4000) + "… (" + (text.length - 4000) + " more characters)" : text;
  };
  // Numbers that a script would round are kept as they were written: what is approved is shown exactly.
  const parse = (text) => JSON.parse(text, (key, value, from) =>
    typeof value === "number" && JSON.rawJSON && from.source !== String(value) ? JSON.rawJSON(from.source) : value);
  const link = (href, text) => {
    const a = make("a", "mono", text);
    a.href = href;
    return a;
  };
  const near = () => log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const add = (item, to = log) => {
    const end = near();
    to.append(item);
    if (end) log.scrollTop = log.scrollHeight;
    $("nothing-said")?.remove();
    return item;
  };
  const bubble = (role, who, text) => {
    const item = make("div", "bubble bubble-" + role);
    item.append(make("p", "muted", who));
    if (text !== undefined) item.append(make("p", "said", text));
    return add(item);
  };
  const note = (text, href, word) => {
    const item = bubble("system", text);
    if (href) item.append(link(href, word));
    return item;
  };

  // Events of a stream, whoever sends it: {event, data}.
  const events = async function* (response) {
    const reader = response.body.getReader(), decoder = new TextDecoder();
    let rest = "";
    try {
      for (;;) {
        const { done, value } = await reader.read();
        rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
        const blocks = rest.split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) {
          let event = "message";
          const data = [];
          for (const line of block.split("\n")) {
            if (line.startsWith("event: ")) event = line.slice(7);
            else if (line.startsWith("data: ")) data.push(line.slice(6));
          }
          if (data.length) yield { event, data: parse(data.join("\n")) };
        }
        if (done) return;
      }
    } finally {
      reader.cancel().catch(() => {}); // a browser has few connections to a server: one that is read no more is given back
    }
  };
  const api = (method, path, body) => fetch(path, {
    method, cache: "no-store", credentials: "same-origin",
    headers: body ? { "Content-Type": "application/json", Accept: "application/json" } : { Accept: "application/json" },
    body: body && JSON.stringify(body),
  });
  const problem = async (response) => {
    if (response.status === 401) return { detail: "The login has ended. Load the page again to log in." };
    try { return await response.json(); } catch { return { detail: "The server answered with status " + response.status + "." }; }
  };

  // What a turn shows, in the order in which it comes.
  const view = () => {
    let text = null, since = null; // the piece of text that grows, and those since the last call
    const calls = new Map(), asked = new Map();
    return {
      delta(piece) {
        if (!text) {
          text = bubble("assistant", "The agent", "");
          (since ||= []).push(text);
        }
        const said = text.querySelector(".said"), end = near();
        said.textContent = said.textContent + visible(piece);
        if (end) log.scrollTop = log.scrollHeight;
      },
      restart() {
        for (const item of since || []) item.remove();
        text = since = null;
      },
      tool(call) {
        text = since = null;
        let item = calls.get(call.id);
        if (!item) {
          item = make("div", "bubble bubble-tool");
          calls.set(call.id, item);
          add(item);
        }
        const details = make("details"), summary = make("summary");
        const was = item.querySelector("details");
        details.open = Boolean(was && was.open);
        const mark = { started: "◌ runs", success: "✓ success", error: "✕ error", unknown: "? unknown", skipped: "– skipped", pending_approval: "◌ waits for approval" };
        summary.append(make("span", "mono", call.name), " ", make("span", "status", mark[call.status] || call.status),
          call.duration_ms === undefined || call.duration_ms === null ? "" : " " + call.duration_ms + " ms");
        details.append(summary, make("pre", "json", shown(call.arguments)));
        if (call.error) details.append(make("pre", "error", shown(call.error)));
        else if (call.result !== undefined) details.append(make("pre", "json", shown(call.result)));
        item.replaceChildren(details);
      },
      approval(a) {
        if (asked.has(a.id)) return;
        const item = bubble("system", "This call needs approval, until " + new Date(a.expires_at).toLocaleString() + ":");
        item.setAttribute("role", "group");
        item.setAttribute("aria-label", "Approval of " + visible(a.skill));
        item.append(make("p", "mono", a.skill), make("pre", "json", typeof a.arguments === "string" ? a.arguments : JSON.stringify(a.arguments, null, 2)));
        const line = make("p", "actions"), said = make("p", "muted");
        said.setAttribute("role", "status");
        for (const [decision, word] of [["approve", "Approve"], ["reject", "Deny"]]) {
          const button = make("button", "", word);
          button.type = "button";
          button.addEventListener("click", () => decide(a.id, decision, line, said));
          line.append(button);
        }
        line.append(link("/approvals/" + encodeURIComponent(a.id), "Its page"));
        if (!JSON.rawJSON) item.append(make("p", "muted", "This browser rounds long numbers; the call's page has them exactly."));
        item.append(line, said);
        asked.set(a.id, item);
      },
    };
  };
  const decide = async (id, decision, line, said) => {
    const buttons = [...line.querySelectorAll("button")];
    for (const b of buttons) b.disabled = true;
    try {
      const response = await api("POST", "/v1/approvals/" + encodeURIComponent(id), { decision, reason: "decided in the console" });
      if (!response.ok) throw new Error((await problem(response)).detail);
      said.textContent = decision === "approve" ? "Approved." : "Denied.";
      for (const b of buttons) b.remove();
    } catch (e) {
      said.textContent = "Not decided: " + visible(e.message);
      for (const b of buttons) b.disabled = false;
    }
  };

  const setBusy = (is) => {
    busy = is;
    send.disabled = is;
    stop.hidden = !is || !turn;
    log.setAttribute("aria-busy", String(is)); // what grows is read out when it is whole
  };
  const begun = (start) => {
    turn = { id: start.execution_id, trace: start.trace_id };
    if (start.session_id !== session) {
      session = $("session-id").value = start.session_id;
      if (who) who.disabled = true; // a session keeps the agent that it began with
      history.replaceState(null, "", "/operate?session=" + encodeURIComponent(session));
    }
    stop.hidden = false;
  };
  const ended = (text) => {
    const trace = turn && turn.trace;
    if (trace) {
      const item = make("div", "bubble bubble-system");
      item.append(make("p", "muted", text + " "));
      item.firstChild.append(link("/traces/" + trace, trace));
      add(item);
    }
    turn = null;
    $("under-way")?.remove();
    tell("");
    setBusy(false);
    box.focus();
  };

  // take shows the events of a stream; it returns what the turn ended with, null when the stream broke.
  const take = async (stream, show) => {
    for await (const { event, data } of stream) {
      if (event === "start") begun(data);
      else if (event === "delta") show.delta(data.text);
      else if (event === "restart") show.restart();
      else if (event === "tool") { tell(data.status === "started" ? "Calls " + data.name + " …" : "Thinks …"); show.tool(data); }
      else if (event === "approval") { tell("Waits for your decision."); show.approval(data); }
      else if (event === "done" || event === "error") return { event, data };
    }
    return null;
  };

  const say = async (message, wait) => {
    if (!wait) bubble("user", "You", message);
    setBusy(true);
    tell(wait ? "Waits for the lane …" : "Thinks …");
    const show = view();
    let result = null, sent = false;
    const since = Date.now();
    try {
      const body = { message };
      if (session) body.session_id = session;
      if (wait) body.wait = true;
      if (who && !who.disabled) body.agent = who.value;
      const response = await fetch("/v1/operate", {
        method: "POST", cache: "no-store", credentials: "same-origin",
        headers: { "Content-Type": "application/json", Accept: "text/event-stream" }, body: JSON.stringify(body),
      });
      sent = true;
      if (!response.ok) return refused(await problem(response), response.status, message);
      result = await take(events(response), show);
    } catch { /* the connection broke: see below */ }
    if (leaving) return;
    if (result && result.event === "error") {
      note(result.data.detail || "It did not work.");
      return ended("It ended with an error. Trace ");
    }
    if (result && result.data.ended !== "waiting_approval" && result.data.ended !== "handed_on") return ended("Done. Trace ");
    if (!turn && sent) await seek(message, since);
    if (leaving) return;
    if (!turn) {
      note(sent ? "The connection broke before the turn began, or told that it had. If it did, it is among the latest turns." : "The server could not be reached.");
      if (!sent) box.value = message;
      return ended("");
    }
    tell(result ? "The turn continues …" : "The connection broke. Looking for the turn …");
    return follow(show);
  };
  // seek looks for a turn of which the page has not heard that it began.
  const seek = async (message, since) => {
    tell("The connection broke. Looking for the turn …");
    for (let tries = 0; tries < 5 && !leaving; tries++) {
      try {
        const response = await api("GET", "/v1/executions?flow=operate&limit=20");
        if (response.ok) {
          const x = (await response.json()).items.find((x) => x.input && x.input.message === message &&
            (!session || x.thread_id === session) && Date.parse(x.created_at) > since - 60000);
          if (x) return begun({ execution_id: x.id, trace_id: x.trace_id, session_id: x.thread_id });
          if (tries > 1) return;
        }
      } catch { /* nobody answers yet */ }
      await pause(1000);
    }
  };
  const refused = (p, status, message) => {
    setBusy(false);
    tell("");
    const item = note("Not said: " + (p.detail || p.title));
    if (status === 409 && p.holder) {
      const line = make("p", "actions");
      const wait = make("button", "", "Wait for the lane"), look = make("button", "", "Watch");
      wait.type = look.type = "button";
      wait.addEventListener("click", () => { line.remove(); say(message, true); });
      look.addEventListener("click", () => { if (!watching) watchOn(); });
      line.append(wait, look);
      item.append(line);
    }
    box.value ||= message;
    box.focus();
  };

  // follow stays with a turn that this page does not stream: one that was found again.
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const follow = async (show) => {
    setBusy(true);
    stop.hidden = false;
    for (let wait = 500; !leaving; wait = Math.min(5000, wait * 1.5)) {
      try {
        const response = await api("GET", "/v1/executions/" + turn.id);
        if (response.status === 401 || response.status === 404) {
          note((await problem(response)).detail);
          return ended("Not found again. Trace ");
        }
        if (response.ok) {
          const x = await response.json();
          if (["completed", "failed", "cancelled", "timeout"].includes(x.status)) return conclude(x);
          if (x.status === "waiting" && x.waiting_for === "approval") {
            tell("Waits for your decision.");
            const list = await api("GET", "/v1/approvals?status=pending&trace_id=" + encodeURIComponent(turn.trace));
            if (list.ok) for (const a of parse(await list.text()).items) show.approval({ id: a.id, skill: a.skill_name, arguments: a.arguments, expires_at: a.expires_at });
          } else tell("The turn continues elsewhere …");
        } else tell("The server is busy; looking again …");
      } catch { tell("The server cannot be reached; looking again …"); }
      await pause(wait);
    }
  };
  const conclude = (x) => {
    if (x.status === "completed") {
      const text = x.result && typeof x.result.text === "string" ? x.result.text : x.result_summary;
      if (text) bubble("assistant", "The agent", text);
      return ended("Done. Trace ");
    }
    note(x.status === "cancelled" ? "The turn was cancelled: " + (x.cancel_reason || "no reason was given") : "The turn " + x.status + ": " + (x.error_message || ""));
    ended("It ended. Trace ");
  };

  // Watch: what another admin does, read only.
  const watchOn = async () => {
    watching = new AbortController();
    watch.setAttribute("aria-pressed", "true");
    watch.textContent = "Stop watching";
    note("Watching who has the lane.");
    try {
      const response = await fetch("/v1/operate/watch", { cache: "no-store", credentials: "same-origin", headers: { Accept: "text/event-stream" }, signal: watching.signal });
      if (!response.ok) throw new Error((await problem(response)).detail);
      let show = view();
      for await (const { event, data } of events(response)) {
        if (event === "lane") note(data.held ? "The lane is held by " + (data.session_id ? "session " + data.session_id : data.holder) + "." : "The lane is free.");
        else if (event === "start") { show = view(); note("A turn begins. Trace ", "/traces/" + encodeURIComponent(data.trace_id), data.trace_id); }
        else if (event === "delta") show.delta(data.text);
        else if (event === "restart") show.restart();
        else if (event === "tool") show.tool(data);
        else if (event === "approval") show.approval(data);
        else if (event === "done") note("That turn has ended.");
        else if (event === "error") note("That turn ended with an error: " + (data.detail || ""));
      }
      note("The watch has ended.");
    } catch (e) {
      if (e.name !== "AbortError" && !leaving) note("The watch has ended: " + e.message);
    }
    watching = null;
    watch.setAttribute("aria-pressed", "false");
    watch.textContent = "Watch";
  };

  form.addEventListener("submit", (e) => {
    e.preventDefault();
    e.stopPropagation(); // the form is used again
    const message = box.value;
    if (busy || !message.trim()) return;
    box.value = "";
    say(message, false);
  });
  box.addEventListener("keydown", (e) => {
    if (e.key === "Enter" && (e.ctrlKey || e.metaKey) && !e.isComposing) {
      e.preventDefault();
      form.requestSubmit();
    }
  });
  stop.addEventListener("click", async () => {
    if (!turn) return;
    stop.disabled = true;
    tell("Stops …");
    try {
      const response = await api("POST", "/v1/executions/" + turn.id + "/cancel", { reason: "stopped in the console" });
      if (!response.ok) note("Not stopped: " + (await problem(response)).detail);
    } catch (e) {
      note("Not stopped: " + e.message);
    }
    stop.disabled = false;
  });
  watch.addEventListener("click", () => { if (watching) watching.abort(); else watchOn(); });
  addEventListener("pagehide", () => { leaving = true; });
  $("say-keys").hidden = false;
  watch.hidden = false;
  log.scrollTop = log.scrollHeight;

  // A turn that was under way when the page was loaded.
  if (log.dataset.execution) {
    turn = { id: log.dataset.execution, trace: log.dataset.trace };
    follow(view());
  }
})();
