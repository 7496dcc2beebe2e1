"use strict";
// The console: what is said to the agent goes to the API with the login of the page, and the answer is shown as it comes.
// A turn whose connection broke is looked for, and shown to its end. Everything that came from elsewhere is put in as text.
(() => {
  const $ = (id) => document.getElementById(id);
  const form = $("say"), box = $("message"), log = $("transcript"), state = $("say-state"), last = $("transcript-end");
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
  // As the server does it: what the viewer may not open is no link.
  const may = (scope) => (document.body.dataset.may || "").split(" ").includes(scope);
  const link = (href, text) => {
    const a = make("a", "mono", text);
    if (may(href.startsWith("/approvals/") ? "approvals:read" : "runs:read")) a.href = href;
    return a;
  };
  // The end of the transcript is read above the composer, which stays at the bottom of the window.
  const below = () => last.getBoundingClientRect().bottom - form.getBoundingClientRect().top;
  const near = () => below() < 120;
  const toEnd = () => { const by = below(); if (by > 0) scrollBy(0, by); };
  const add = (item) => {
    const end = near();
    log.insertBefore(item, last);
    if (end) toEnd();
    $("nothing-said")?.remove();
    return item;
  };
  // Answers are Markdown; it has passed through visible before.
  const rich = (element, text) => {
    element.classList.add("md");
    element.replaceChildren(renderMarkdown(text));
  };
  const bubble = (role, who, text) => {
    const item = make("div", "bubble bubble-" + role);
    item.append(make("p", "muted", who));
    if (text !== undefined) {
      const said = make("div", "said", text);
      said.dir = "auto";
      if (role === "assistant") rich(said, visible(text));
      item.append(said);
    }
    return add(item);
  };
  const note = (text, href, word) => {
    const item = bubble("system", text);
    if (href) item.append(link(href, word));
    return item;
  };

  // Events of a stream, whoever sends it: {event, data}. The server writes at least every 15 s: a connection that a
  // network forgot reports no error.
  const events = async function* (response) {
    const reader = response.body.getReader(), decoder = new TextDecoder();
    let rest = "";
    try {
      for (;;) {
        let silent;
        const lost = new Promise((_, reject) => {
          silent = setTimeout(() => reject(new Error("the connection is lost")), 35000);
        });
        const { done, value } = await Promise.race([reader.read(), lost]).finally(() => clearTimeout(silent));
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
  const marks = {
    started: "▶ running", success: "✓ success", error: "✕ error", unknown: "? unknown", skipped: "– skipped",
    pending_approval: "◷ waits for approval", stopped: "⊘ stopped",
  };
  const markCall = (item, call) => {
    const details = make("details"), summary = make("summary"), was = item.querySelector("details");
    details.open = Boolean(was && was.open);
    summary.append(make("span", "mono", call.name), " ", make("span", "status", marks[call.status] || call.status),
      call.duration_ms === undefined || call.duration_ms === null ? "" : " " + human.duration(call.duration_ms));
    details.append(summary, make("pre", "json", shown(call.arguments)));
    if (call.error) details.append(make("pre", "error", shown(call.error)));
    else if (call.result !== undefined && call.result !== null) details.append(make("pre", "json", shown(call.result)));
    item.dataset.status = call.status;
    item.replaceChildren(details);
  };
  const view = () => {
    let text = null, since = null, raw = "", frame = 0; // the piece of text that grows, and those since the last call
    const calls = new Map(), rows = new Map(); // by the id of the stream, and by that of the log
    for (const item of log.querySelectorAll("[data-call]")) rows.set(item.dataset.call, { item });
    const draw = () => {
      frame = 0;
      if (!text) return;
      const end = near();
      rich(text.querySelector(".said"), raw);
      if (end) toEnd();
    };
    const finish = () => {
      if (frame) { cancelAnimationFrame(frame); draw(); }
      text = null;
    };
    return {
      said: "", // the last piece of text
      delta(piece) {
        if (!text) {
          text = bubble("assistant", "The agent", "");
          (since ||= []).push(text);
          raw = "";
        }
        raw += visible(piece);
        this.said = raw;
        frame ||= requestAnimationFrame(draw);
      },
      restart() {
        finish();
        for (const item of since || []) item.remove();
        since = null;
        this.said = "";
      },
      tool(call) {
        finish();
        since = null;
        if (!calls.has(call.id)) calls.set(call.id, { item: add(make("div", "bubble bubble-tool")), call });
        calls.get(call.id).call = call;
        markCall(calls.get(call.id).item, call);
      },
      // row shows a row of the log. A call that the stream has shown is the same one, in the order of its name.
      row(r) {
        if (r.kind === "model") {
          if (rows.has(r.id) || r.status !== "success") return;
          rows.set(r.id, {});
          if (!r.output || !r.output.content) return;
          this.restart(); // the stream broke in the middle of this text
          this.delta(r.output.content);
          finish();
          since = null;
          return;
        }
        if (r.kind !== "call") return;
        const call = {
          id: r.id, name: r.skill_name, arguments: r.input, status: r.status === "running" ? "started" : r.status,
          error: r.error_message, result: r.error_message ? undefined : r.output, duration_ms: r.duration_ms,
        };
        if (!rows.has(r.id)) {
          const streamed = [...calls.values()].find((c) => !c.row && c.call.name === r.skill_name);
          if (streamed) streamed.row = r.id;
          rows.set(r.id, streamed || { item: add(make("div", "bubble bubble-tool")) });
        }
        const { item } = rows.get(r.id);
        if (item.dataset.status !== call.status) markCall(item, call);
      },
      // known takes the texts of the log for shown: the stream has shown them.
      known(list) { for (const r of list) if (r.kind === "model") rows.set(r.id, {}); },
      finish,
      // close marks what the end of the turn has stopped.
      close() {
        finish();
        for (const { item, call } of calls.values()) if (item.dataset.status === "started") markCall(item, { ...call, status: "stopped" });
        for (const item of log.querySelectorAll(".bubble-tool .status-running")) item.replaceWith(make("span", "status", marks.stopped));
      },
      approval(a) {
        if ($("approval-" + a.id)) return;
        finish();
        since = null;
        const item = make("article", "approval"), title = make("h3", "", "Approval requested: ");
        item.id = "approval-" + a.id;
        item.dataset.approval = a.id;
        title.id = item.id + "-title";
        item.setAttribute("aria-labelledby", title.id);
        const to = link("/approvals/" + encodeURIComponent(a.id), a.skill);
        to.className = "";
        title.append(to);
        const args = make("pre", "json exact");
        args.textContent = visible(typeof a.arguments === "string" ? a.arguments : JSON.stringify(a.arguments, null, 2));
        args.tabIndex = 0;
        args.setAttribute("role", "region");
        args.setAttribute("aria-label", "Arguments of " + visible(a.skill));
        const decide = make("form", "decide"), label = make("label"), reason = make("input");
        decide.method = "post";
        decide.action = "/act/v1/approvals/" + encodeURIComponent(a.id);
        reason.name = "reason";
        reason.maxLength = 500;
        reason.autocomplete = "off";
        reason.placeholder = "Reason (optional)";
        label.append(make("span", "aside-text", "Reason"), " ", reason);
        decide.append(label);
        for (const [value, word, kind] of [["approve", "Approve", ""], ["reject", "Reject", "plain"]]) {
          const button = make("button", kind, word);
          button.type = "submit";
          button.name = "decision";
          button.value = value;
          decide.append(button);
        }
        item.append(title, args);
        if (!JSON.rawJSON) item.append(make("p", "muted", "This browser rounds long numbers; the call's page has them exactly."));
        const expires = make("p", "muted", "expires "), until = make("time", "until");
        until.dateTime = a.expires_at;
        expires.append(until);
        item.append(expires, decide);
        add(item);
        clocks.watch(item);
        watchApproval(item);
      },
    };
  };

  // An approval is decided where it is asked for. A line above the composer leads to one that is out of view.
  const hiddenOnes = new Set();
  const askedLine = () => {
    for (const item of hiddenOnes) if (!item.isConnected || item.matches(".decided")) hiddenOnes.delete(item);
    const n = hiddenOnes.size;
    $("asked-line").hidden = !n;
    const text = n === 1 ? "1 approval requested: show" : n + " approvals requested: show";
    if (n && $("asked-link").textContent !== text) $("asked-link").textContent = text;
  };
  const inView = new IntersectionObserver((entries) => {
    for (const { target, intersectionRatio } of entries) {
      const item = target.closest(".approval");
      if (item && intersectionRatio < 0.9) hiddenOnes.add(item);
      else hiddenOnes.delete(item);
    }
    askedLine();
  }, { rootMargin: "-60px 0px -" + Math.round(form.getBoundingClientRect().height) + "px 0px", threshold: [0, 0.9] });
  const watchApproval = (item) => { const f = item.querySelector(".decide"); if (f) inView.observe(f); };
  $("asked-link").addEventListener("click", (e) => {
    e.preventDefault();
    const item = [...log.querySelectorAll(".approval:not(.decided)")].find((a) => hiddenOnes.has(a));
    item?.querySelector(".decide").scrollIntoView({ block: "center" });
    item?.querySelector(".decide button:not([disabled])")?.focus({ preventScroll: true });
  });
  log.addEventListener("submit", async (e) => {
    const decide = e.target.closest("form.decide");
    if (!decide || !e.submitter) return;
    e.preventDefault();
    e.stopPropagation();
    const item = decide.closest(".approval"), said = item.querySelector("[role=status]") || make("p", "muted");
    const buttons = [...decide.querySelectorAll("button:not([hidden])")], decision = e.submitter.value;
    said.setAttribute("role", "status");
    item.append(said);
    for (const b of buttons) b.disabled = true;
    try {
      const reason = decide.elements.reason.value.trim() || "decided in the console";
      const response = await api("POST", "/v1/approvals/" + encodeURIComponent(item.dataset.approval), { decision, reason });
      if (!response.ok) throw new Error((await problem(response)).detail);
      said.textContent = decision === "approve" ? "Approved." : "Rejected.";
      decide.remove();
      item.classList.add("decided");
      askedLine();
      box.focus({ preventScroll: true });
    } catch (error) {
      said.textContent = "Not decided: " + visible(error.message);
      for (const b of buttons) b.disabled = false;
    }
  });

  const setBusy = (is) => {
    busy = is;
    send.disabled = is;
    stop.hidden = !is || !turn;
    log.setAttribute("aria-busy", String(is)); // what grows is read out when it is whole
  };
  const turns = new Set(); // the executions that this page has shown
  const begun = (start, message) => {
    turns.add(start.execution_id);
    turn = { id: start.execution_id, trace: start.trace_id };
    if (start.session_id !== session) {
      session = $("session-id").value = start.session_id;
      if (who) who.disabled = true; // a session keeps the agent that it began with
      $("session-title").textContent = visible(message || "").slice(0, 120) || "Session";
      history.replaceState(null, "", "/operate?session=" + encodeURIComponent(session));
    }
    stop.hidden = false;
  };
  const ended = (text, show) => {
    show?.close();
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
  const take = async (stream, show, message) => {
    for await (const { event, data } of stream) {
      if (event === "start") begun(data, message);
      else if (event === "delta") show.delta(data.text);
      else if (event === "restart") show.restart();
      else if (event === "tool") { tell(data.status === "started" ? "Calls " + data.name + " …" : "Thinks …"); show.tool(data); }
      else if (event === "approval") { tell("Approval requested: " + data.skill + "."); show.approval(data); }
      else if (event === "done" || event === "error") { show.finish(); return { event, data }; }
    }
    return null;
  };

  // typed returns the text that sends a message: a message with a slash is typed with two.
  const typed = (message) => message.startsWith("/") ? "/" + message : message;

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
      // A browser or a proxy may send the request again; under the key its turn runs once.
      const key = [...crypto.getRandomValues(new Uint32Array(4))].join("-");
      const response = await fetch("/v1/operate", {
        method: "POST", cache: "no-store", credentials: "same-origin",
        headers: { "Content-Type": "application/json", Accept: "text/event-stream", "Idempotency-Key": key },
        body: JSON.stringify(body),
      });
      sent = true;
      if (!response.ok) return refused(await problem(response), response.status, message);
      result = await take(events(response), show, message);
    } catch { /* the connection broke: see below */ }
    if (leaving) return;
    if (result && result.event === "error") {
      note(result.data.detail || "It did not work.");
      return ended("It ended with an error. Trace ", show);
    }
    if (result && result.data.ended !== "waiting_approval" && result.data.ended !== "handed_on") return ended("Done. Trace ", show);
    if (!turn && (sent || session)) await seek(message, since, sent ? 60000 : 3000);
    if (leaving) return;
    if (!turn) {
      note(sent ? "The connection broke before the first answer. If the turn began, it is among the latest turns." : "The server could not be reached.");
      if (!sent) box.value = box.value ? typed(message) + "\n" + box.value : typed(message);
      return ended("", show);
    }
    tell(result ? "The turn continues …" : "The connection broke. Looking for the turn …");
    return follow(show, true);
  };
  // seek looks for the turn of a request whose answer was lost. If nothing of the answer came, seek needs a session,
  // because another admin may have sent the same message.
  const seek = async (message, since, slack) => {
    tell("The connection broke. Looking for the turn …");
    for (let tries = 0; tries < 5 && !leaving; tries++) {
      try {
        const response = await api("GET", "/v1/executions?flow=operate&limit=20");
        if (response.ok) {
          const x = (await response.json()).items.find((x) => !turns.has(x.id) && x.input && x.input.message === message &&
            (!session || x.thread_id === session) && Date.parse(x.created_at) > since - slack);
          if (x) return begun({ execution_id: x.id, trace_id: x.trace_id, session_id: x.thread_id }, message);
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
      wait.addEventListener("click", () => {
        line.remove();
        if (box.value === typed(message)) box.value = "";
        grow();
        say(message, true);
      });
      look.addEventListener("click", () => { if (!watching) watchOn(); });
      line.append(wait, look);
      item.append(line);
    }
    box.value ||= typed(message);
    box.focus();
  };

  // follow stays with a turn that this page does not stream: one that was found again. Its calls and texts are read
  // from the log; texts that a stream has shown are not shown again.
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const catchUp = async (show, streamed) => {
    const response = await api("GET", "/v1/activity?limit=100&trace_id=" + encodeURIComponent(turn.trace));
    if (!response.ok) return;
    const list = ((await response.json()).items || []).reverse();
    if (streamed) show.known(list);
    for (const r of list) show.row(r);
  };
  const follow = async (show, streamed) => {
    setBusy(true);
    stop.hidden = false;
    for (let wait = 500; !leaving; wait = Math.min(5000, wait * 1.5)) {
      try {
        const response = await api("GET", "/v1/executions/" + turn.id);
        if (response.status === 401 || response.status === 404) {
          note((await problem(response)).detail);
          return ended("Not found again. Trace ", show);
        }
        if (response.ok) {
          const x = await response.json();
          await catchUp(show, streamed);
          streamed = false;
          if (["completed", "failed", "cancelled", "timeout"].includes(x.status)) return conclude(x, show);
          let asked = [];
          if (x.status === "waiting" && ["approval", "agent"].includes(x.waiting_for)) { // agent: a delegated task may ask
            const list = await api("GET", "/v1/approvals?status=pending&trace_id=" + encodeURIComponent(turn.trace));
            if (list.ok) asked = parse(await list.text()).items;
            for (const a of asked) show.approval({ id: a.id, skill: a.skill_name, arguments: a.arguments, expires_at: a.expires_at });
          }
          tell(asked.length ? "An approval is requested." : "The turn continues …");
        } else tell("The server is busy; looking again …");
      } catch { tell("The server cannot be reached; looking again …"); }
      await pause(wait);
    }
  };
  const conclude = (x, show) => {
    if (x.status === "completed") {
      const text = x.result && typeof x.result.text === "string" ? x.result.text : x.result_summary;
      if (text && visible(text) !== show.said) {
        show.restart();
        bubble("assistant", "The agent", text);
      }
      return ended("Done. Trace ", show);
    }
    note(x.status === "cancelled" ? "The turn was cancelled: " + (x.cancel_reason || "no reason was given") : "The turn " + x.status + ": " + (x.error_message || ""));
    ended("It ended. Trace ", show);
  };

  // Watch: what another admin does, read only.
  const watchOn = async () => {
    watching = new AbortController();
    watch.setAttribute("aria-pressed", "true");
    watch.textContent = "Stop watching";
    note("Watching the holder of the lane.");
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

  const stopTurn = async () => {
    if (!turn) return note("No turn is running.");
    stop.disabled = true;
    tell("Stops …");
    try {
      const response = await api("POST", "/v1/executions/" + turn.id + "/cancel", { reason: "stopped in the console" });
      if (!response.ok) note("Not stopped: " + (await problem(response)).detail);
    } catch (e) {
      note("Not stopped: " + e.message);
    }
    stop.disabled = false;
  };

  // Commands. Each calls a route of the API, or does what a button does.
  const call = async (method, path, body) => {
    const response = await api(method, path, body);
    if (!response.ok) throw new Error((await problem(response)).detail);
    return response.json();
  };
  const list = async (title, path, line) => {
    const { items } = await call("GET", path), item = note(items.length ? title : title + ": none"), ul = make("ul");
    for (const x of items) {
      const li = make("li"), [href, word, rest] = line(x);
      li.append(link(href, word), rest ? " " + visible(rest).slice(0, 160) : "");
      ul.append(li);
    }
    if (items.length) item.append(ul);
    toEnd();
  };
  const needs = (rest, what) => { if (!rest) throw new Error("name " + what); return rest; };
  const commands = [
    ["help", "", "list the commands", () => {
      const item = note("Commands. A message that begins with // is sent with one /."), ul = make("ul");
      for (const [name, args, about] of commands) {
        const li = make("li");
        li.append(make("code", "", "/" + name + (args && " " + args)), " " + about);
        ul.append(li);
      }
      item.append(ul);
      toEnd();
    }],
    ["stop", "", "stop the running turn", stopTurn],
    ["new", "", "begin a new session", () => { location.href = "/operate"; }],
    ["rename", "NAME", "name this session", async (rest) => {
      if (!session) throw new Error("this session has no message yet");
      await call("PATCH", "/v1/threads/" + encodeURIComponent(session), { title: needs(rest, "the session: /rename NAME") });
      $("session-title").textContent = visible(rest);
      note("The session is named " + rest + ".");
    }],
    ["pause", "REASON", "pause autonomous work", async (rest) => { await call("POST", "/v1/pause", { reason: needs(rest, "a reason: /pause REASON") }); note("Autonomous work is paused."); }],
    ["resume", "REASON", "resume autonomous work", async (rest) => { await call("POST", "/v1/resume", { reason: needs(rest, "a reason: /resume REASON") }); note("Autonomous work is resumed."); }],
    ["skills", "", "list skills", () => list("Skills", "/v1/skills?limit=100", (x) => ["/skills/" + encodeURIComponent(x.name), x.name, (x.enabled ? "" : "(disabled) ") + (x.description || "")])],
    ["objectives", "", "list objectives", () => list("Objectives", "/v1/objectives?limit=50", (x) => ["/objectives/" + encodeURIComponent(x.name), x.name, x.status])],
    ["approvals", "", "list requested approvals", () => list("Approvals requested", "/v1/approvals?status=pending&limit=50", (x) => ["/approvals/" + encodeURIComponent(x.id), x.skill_name, JSON.stringify(x.arguments)])],
    ["lanes", "", "list held lanes", () => list("Lanes held", "/v1/lanes?limit=50", (x) => ["/lanes?lane=" + encodeURIComponent(x.lane), x.lane, x.locked_by || x.holder])],
    ["watch", "", "watch the admin that holds the lane, or stop watching", () => watch.click()],
  ];
  const run = async (line) => {
    const [, name, rest] = line.match(/^\/(\S*)\s*([\s\S]*)$/), command = commands.find((c) => c[0] === name);
    bubble("user", "You", line);
    try {
      if (!command) throw new Error("there is no command /" + name + "; /help lists them");
      await command[3](rest.trim());
    } catch (e) {
      note("Not done: " + e.message);
    }
  };
  const options = $("commands");
  let chosen = -1;
  const choose = (i) => {
    const items = [...options.children];
    chosen = items.length ? (i + items.length) % items.length : -1;
    items.forEach((li, n) => li.setAttribute("aria-selected", String(n === chosen)));
    if (chosen >= 0) {
      box.setAttribute("aria-activedescendant", items[chosen].id);
      items[chosen].scrollIntoView({ block: "nearest" });
    } else box.removeAttribute("aria-activedescendant");
  };
  const suggest = () => {
    const typed = /^\/(\S*)$/.exec(box.value.trimStart());
    const found = typed ? commands.filter((c) => c[0].startsWith(typed[1])) : [];
    options.hidden = !found.length;
    options.replaceChildren(...found.map((c) => {
      const li = make("li");
      li.id = "command-" + c[0];
      li.setAttribute("role", "option");
      li.append(make("code", "", "/" + c[0] + (c[1] && " " + c[1])), make("span", "", c[2]));
      return li;
    }));
    choose(found.length ? 0 : -1);
    if (found.length) $("said").textContent = found.length + (found.length === 1 ? " command" : " commands");
  };
  const complete = (li) => {
    const [name, args] = commands.find((c) => "command-" + c[0] === li.id);
    box.value = "/" + name + (args ? " " : "");
    suggest();
    options.hidden = true;
    if (!args) form.requestSubmit();
    else box.focus();
  };
  options.addEventListener("pointerdown", (e) => {
    const li = e.target.closest("li");
    e.preventDefault();
    if (li) complete(li);
  });
  const grow = () => {
    box.style.height = "auto";
    box.style.height = box.scrollHeight + 2 + "px";
  };

  form.addEventListener("submit", (e) => {
    e.preventDefault();
    e.stopPropagation(); // the form is used again
    const message = box.value.trim();
    const command = message.startsWith("/") && !message.startsWith("//");
    if (!message || busy && !command) return;
    box.value = "";
    suggest();
    grow();
    toEnd();
    if (command) run(message);
    else say(message.replace(/^\/\//, "/"), false);
  });
  box.addEventListener("input", () => { suggest(); grow(); });
  box.addEventListener("blur", () => { options.hidden = true; });
  box.addEventListener("keydown", (e) => {
    if (e.isComposing || e.keyCode === 229) return; // Safari ends the composition before the key that confirms it
    if (!options.hidden && chosen >= 0) {
      const li = options.children[chosen];
      const does = {
        ArrowDown: () => choose(chosen + 1), ArrowUp: () => choose(chosen - 1), Tab: () => complete(li),
        Enter: () => li.id === "command-" + box.value.trim().slice(1) ? form.requestSubmit() : complete(li),
        Escape: () => { options.hidden = true; },
      }[e.key];
      if (does && !e.shiftKey) {
        e.preventDefault();
        e.stopPropagation();
        return does();
      }
    }
    if (e.key === "Enter" && (e.ctrlKey || e.metaKey || !e.shiftKey && /^\/(?!\/).*$/.test(box.value.trimStart()))) {
      e.preventDefault();
      form.requestSubmit();
    }
  });
  stop.addEventListener("click", stopTurn);
  watch.addEventListener("click", () => { if (watching) watching.abort(); else watchOn(); });
  addEventListener("pagehide", () => { leaving = true; });
  addEventListener("pageshow", (e) => { // persisted: the page was left in the middle of a turn, and is shown again
    leaving = false;
    if (e.persisted && busy) location.reload();
  });
  $("say-keys").hidden = false;
  watch.hidden = false;
  box.setAttribute("aria-autocomplete", "list");
  box.setAttribute("aria-controls", "commands");
  for (const said of log.querySelectorAll(".bubble-assistant .said")) rich(said, said.textContent);
  for (const item of log.querySelectorAll(".approval")) watchApproval(item);
  if (!location.hash) toEnd();

  // A turn that was under way when the page was loaded.
  if (log.dataset.execution) {
    turn = { id: log.dataset.execution, trace: log.dataset.trace };
    turns.add(turn.id);
    follow(view(), false);
  }
})();
