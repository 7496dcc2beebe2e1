"use strict";

// A chat with the agent over POST /v1/chat/completions. The server stores the conversation. This page keeps the key, the
// visitor's token and the name of the thread until the tab is closed.

const byId = (id) => document.getElementById(id);
const login = byId("login"), conversation = byId("conversation"), scroller = byId("scroller"), messages = byId("messages");
const statusLine = byId("status"), message = byId("message"), files = byId("files"), attachments = byId("attachments");
const send = byId("send"), stop = byId("stop"), agents = byId("agents");
const store = window.sessionStorage;
const options = new URLSearchParams(location.search);

let attached = [];   // files of the next message
let running = null;  // the answer in progress
let generation = 0;  // changes with each conversation; later results of an older one are ignored
let agentName = "Agent";

// Refusal is an error response of the server.
class Refusal extends Error {
  constructor(status, text, code) {
    super(text);
    this.status = status;
    this.code = code;
  }
}

// --- Appearance

function applyTheme() {
  const root = document.documentElement;
  if (["light", "dark"].includes(options.get("theme"))) root.dataset.theme = options.get("theme");
  const accent = options.get("accent"), radius = options.get("radius");
  if (accent && CSS.supports("color", accent)) {
    root.style.setProperty("--accent", accent);
    root.style.setProperty("--on-accent", isLight(accent) ? "#000" : "#fff");
  }
  if (radius && CSS.supports("border-radius", radius)) root.style.setProperty("--radius", radius);
  if (!options.get("embed")) return;
  byId("close").hidden = options.get("embed") !== "button";
  new ResizeObserver(postHeight).observe(messages);
  postHeight();
}

function isLight(color) {
  const context = document.createElement("canvas").getContext("2d");
  context.fillStyle = color;
  context.fillRect(0, 0, 1, 1);
  const [r, g, b] = context.getImageData(0, 0, 1, 1).data;
  return 0.299 * r + 0.587 * g + 0.114 * b > 150;
}

// postHeight sends the height that shows everything to the site that embeds the page.
function postHeight() {
  if (window.parent === window) return;
  const around = document.body.clientHeight - scroller.clientHeight;
  const height = around + messages.scrollHeight + 48;
  window.parent.postMessage({ chat: "height", height }, "*"); // a number, no content
}

// --- Key, visitor and conversation

function open() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.get("key") && given.get("key") !== store.getItem("key")) {
    store.setItem("key", given.get("key"));
  }
  if (given.get("join")) { // an invitation into another thread
    store.setItem("join", given.get("join"));
    store.removeItem("thread");
  }
  if (given.get("key") || given.get("join")) {
    history.replaceState(null, "", location.pathname + location.search); // remove it from the history
  }
  const known = Boolean(store.getItem("key"));
  login.hidden = known;
  conversation.hidden = byId("new").hidden = !known;
  (known ? message : byId("key")).focus({ preventScroll: true });
  if (known) start();
}

async function start() {
  const current = ++generation;
  messages.replaceChildren();
  setStatus("");
  byId("earlier").hidden = true;
  const listed = loadAgents(current);
  if (store.getItem("thread")) {
    await showHistory(current, listed);
  } else {
    await listed;
    if (current === generation && !store.getItem("join")) greet();
  }
}

// visitor returns the token of this visitor. The page generates it, so a lost answer does not lose the invitation.
function visitor() {
  if (!store.getItem("visitor")) {
    store.setItem("visitor", "vis_" + randomKey());
  }
  return store.getItem("visitor");
}

// randomKey returns 32 random bytes in base64url.
function randomKey() {
  const random = String.fromCharCode(...crypto.getRandomValues(new Uint8Array(32)));
  return btoa(random).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

function headers() {
  const h = { Authorization: "Bearer " + store.getItem("key"), "Content-Type": "application/json", "X-Visitor-Token": visitor() };
  if (store.getItem("join")) h["X-Thread-Join"] = store.getItem("join");
  if (store.getItem("thread")) h["X-Thread-Id"] = store.getItem("thread");
  return h;
}

const unreachable = "The server cannot be reached.";

// call is fetch with an error for people: that of a browser is "Failed to fetch". A request without a signal ends after
// maxSilence.
function call(path, init) {
  const timed = { signal: AbortSignal.timeout(maxSilence), ...init };
  return fetch(path, timed).catch(() => { throw new Error(unreachable); });
}

async function refusalOf(response) {
  let text = "The server answers " + response.status + ".", code = "";
  try {
    const { error } = await response.json();
    text = error.message || text;
    code = error.code || "";
  } catch { /* no error of the protocol */ }
  const wait = response.headers.get("Retry-After");
  return new Refusal(response.status, wait && wait < 600 ? text + " Try again in " + wait + " s." : text, code);
}

// --- Agents

let known = []; // the agents of the key

async function loadAgents(current) {
  try {
    const response = await call("/v1/models", { headers: headers() });
    if (response.status === 401 && current === generation) return logout();
    if (!response.ok || current !== generation) return; // the first message reports the error
    const { data } = await response.json();
    known = data.filter((model, i) => model.id !== "agent" || i === 0); // the default is first; a later one is its alias
  } catch {
    return;
  }
  const wanted = store.getItem("agent") || options.get("agent");
  const selected = known.find((model) => model.id === wanted) || known[0];
  if (current !== generation) return;
  agents.replaceChildren(...known.map((model) => new Option(model.id, model.id, false, model.id === selected?.id)));
  agents.hidden = byId("agents-label").hidden = known.length < 2;
  nameAgent(selected);
}

function nameAgent(model) {
  if (!model) return;
  agentName = model.id === "agent" ? "Agent" : model.id;
  byId("title").textContent = document.title = agentName === "Agent" ? "Chat" : agentName;
  for (const author of messages.querySelectorAll(".agent .author")) { // of messages that came before the list
    if (author.textContent === "Agent") author.textContent = agentName;
  }
}

// model returns the model id of a message.
function model() {
  return known.length > 1 ? agents.value : "agent";
}

function greet() {
  const greeting = known.find((m) => m.id === (known.length > 1 ? agents.value : known[0].id))?.greeting;
  if (greeting && !messages.querySelector(".agent")) {
    const box = addMessage("agent", "prepend");
    box.show(greeting);
  }
}

// --- Messages

const thinking = "Thinking …"; // until there is something to show

// addMessage adds a message and returns functions that change it.
function addMessage(role, where = "append") {
  const box = document.createElement("article"), author = document.createElement("span"), body = document.createElement("div");
  box.className = "message " + role;
  author.className = "author";
  author.textContent = role === "user" ? "You" : agentName;
  body.className = "body";
  body.dir = "auto";
  box.append(author, body);
  messages[where](box);
  let frame = 0, text = "", line = null;
  const draw = () => {
    frame = 0;
    if (role === "user") body.textContent = text;
    else body.replaceChildren(renderMarkdown(text));
    follow();
  };
  follow(role === "user" && where === "append");
  return {
    box,
    get text() { return text; },
    show(next) {
      if (next && line?.textContent === thinking) this.activity("");
      text = next;
      body.hidden = !text;
      frame ||= requestAnimationFrame(draw);
    },
    flush() {
      cancelAnimationFrame(frame);
      draw();
    },
    activity(words) {
      line?.remove();
      line = null;
      if (!words) return;
      line = document.createElement("p");
      line.className = "activity";
      line.textContent = words;
      box.append(line);
      follow();
    },
    note(words, action, run) {
      const note = document.createElement("p");
      note.className = "interrupted";
      note.textContent = words + " ";
      if (action) {
        const button = document.createElement("button");
        button.type = "button";
        button.className = "quiet";
        button.textContent = action;
        button.addEventListener("click", () => {
          note.remove();
          if (!text) box.remove();
          run();
        });
        note.append(button);
      }
      box.append(note);
      follow();
      return note;
    },
    files(list) {
      if (!list.length) return;
      const ul = document.createElement("ul");
      ul.className = "files";
      for (const { name, url } of list) {
        const li = document.createElement("li");
        li.textContent = "📎 " + name;
        if (url) {
          const image = document.createElement("img");
          image.src = url;
          image.alt = name;
          li.append(image);
        }
        ul.append(li);
      }
      box.append(ul);
    },
    remove() { box.remove(); },
  };
}

// follow scrolls to the latest message if the reader is there, or if force is set.
let atEnd = true, lastTop = 0;
function follow(force) {
  if (force) atEnd = true;
  if (atEnd) scroller.scrollTop = scroller.scrollHeight;
  if (options.get("embed")) postHeight();
}
scroller.addEventListener("scroll", () => {
  const near = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 80;
  if (near || scroller.scrollTop < lastTop) atEnd = near; // a longer message does not count as scrolling up
  lastTop = scroller.scrollTop;
  byId("latest").hidden = atEnd;
});
byId("latest").addEventListener("click", () => {
  scroller.scrollTop = scroller.scrollHeight;
  message.focus();
});

// --- History

let oldest = ""; // the id of the oldest item shown

async function items(after) {
  const query = new URLSearchParams({ limit: 30, order: "desc" });
  if (after) query.set("after", after);
  const response = await call("/v1/conversations/" + encodeURIComponent(store.getItem("thread")) + "/items?" + query, { headers: headers() });
  if (!response.ok) throw await refusalOf(response);
  return response.json();
}

// showHistory shows the latest messages and attaches to the answer in progress. It waits for the names of the agents.
async function showHistory(current, listed) {
  try {
    const [list] = await Promise.all([items(""), listed]);
    if (current !== generation) return;
    showItems(list);
    scroller.scrollTop = scroller.scrollHeight;
    const active = list.data.filter((it) => it.status === "in_progress").reverse(); // oldest first
    for (const it of active) resume(it.id.replace("msg_", ""), current);
  } catch (problem) {
    if (current !== generation) return;
    if (problem.status === 401) return logout();
    if (problem.status === 404) { // the conversation is gone
      store.removeItem("thread");
      return start();
    }
    fail(problem.message + " ", () => start());
  }
}

// showItems adds a page of items, newest first, above those that are shown.
function showItems(list) {
  for (const it of list.data) {
    if (it.status === "in_progress") continue;
    const box = addMessage(it.role === "user" ? "user" : "agent", "prepend");
    const text = it.content.filter((part) => part.text).map((part) => part.text).join("\n\n");
    box.show(text);
    box.files(it.content.filter((part) => part.type === "input_file" || part.type === "input_image").map((part) => ({ name: part.filename || "image" })));
    if (it.status === "incomplete") box.note("Stopped.");
    box.flush();
  }
  oldest = list.last_id || oldest;
  byId("earlier").hidden = !list.has_more;
}

byId("earlier").addEventListener("click", async () => {
  const current = generation;
  try {
    const list = await items(oldest);
    if (current !== generation) return;
    const top = scroller.scrollTop, height = scroller.scrollHeight;
    showItems(list);
    scroller.scrollTop = top + scroller.scrollHeight - height;
  } catch (problem) {
    fail(problem.message);
  }
});

// --- Answers

const maxSilence = 25000; // the server writes to a stream at least every 10 s

// heard waits for a promise as long as the connection may be silent. A connection that a network forgot reports no
// error.
function heard(promise, close) {
  let timer;
  const lost = new Promise((_, reject) => {
    timer = setTimeout(() => { close(); reject(new Error("The connection broke.")); }, maxSilence);
  });
  return Promise.race([promise, lost]).finally(() => clearTimeout(timer));
}

// read shows a stream. It returns how the stream ended: complete, approval (the turn still waits for one) or broken.
async function read(response, turn, current) {
  if (response.headers.get("X-Visitor-Token")) store.setItem("visitor", response.headers.get("X-Visitor-Token"));
  if (!response.ok) {
    const refusal = await refusalOf(response);
    if (refusal.code === "still_running") turn.id = response.headers.get("X-Completion-Id") || "";
    throw refusal;
  }
  if (current === generation) {
    store.removeItem("join");
    if (response.headers.get("X-Thread-Id")) store.setItem("thread", response.headers.get("X-Thread-Id"));
    if (!turn.stopped && running === turn && !turn.waiting) setStatus("The agent is answering …");
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", text = "", activity = "";
  for (;;) {
    const { value, done } = await heard(reader.read(), () => reader.cancel().catch(() => {}));
    if (done) return "broken";
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6).trim();
      if (data === "[DONE]") return activity === "approval" ? activity : "complete";
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(200, chunk.error.message, chunk.error.code);
      turn.id = chunk.id || turn.id;
      if (chunk.activity) {
        activity = chunk.activity.type;
        turn.box.activity(activityText(chunk.activity));
      }
      for (const choice of chunk.choices) text += choice.delta.content || "";
      if (text.length > turn.box.text.length) turn.tries = 0;
      if (text && text !== turn.box.text) turn.box.show(text);
    }
  }
}

function activityText({ type, name }) {
  switch (type) {
    case "tool": return "Using " + name.replaceAll("_", " ") + " …";
    case "approval": return "Waiting for an approval …";
    default: return "";
  }
}

// attach reads an answer until it is complete. It attaches again when the connection breaks: the answer continues.
async function attach(request, turn, current) {
  for (turn.tries = 0; ; turn.tries++) {
    let end = "broken";
    try {
      end = await read(await request(turn), turn, current);
      if (end === "complete") return;
    } catch (problem) {
      const again = !(problem instanceof Refusal) || problem.status === 429 || problem.status >= 500 ||
        ["shutting_down", "answer_restarted", "still_running"].includes(problem.code);
      if (!again || !turn.id || current !== generation) throw problem;
    }
    if (end === "approval") { // it may take days, so the visitor can go on writing
      turn.tries = 0;
      turn.waiting = true;
      if (running === turn) {
        send.hidden = false;
        setStatus("");
      }
    }
    if (!turn.id || turn.tries >= 8 || current !== generation) throw new Error("The connection broke.");
    if (end === "broken" && running === turn && !turn.waiting) statusLine.textContent = "The connection broke; attaching again …";
    await new Promise((done) => setTimeout(done, Math.min(500 * 2 ** turn.tries, 8000)));
    request = () => attachRequest(turn.id);
  }
}

function attachRequest(id) {
  const c = new AbortController(), path = "/v1/chat/completions/" + encodeURIComponent(id) + "?stream=true&include_activity=true";
  return heard(call(path, { headers: headers(), signal: c.signal }), () => c.abort());
}

let uploaded = new WeakMap(); // the ids of files that the server has

// upload stores the files that the server lacks, and returns the content of a message with all of them.
async function upload(text, chosen, signal) {
  if (!chosen.length) return text;
  const parts = text ? [{ type: "text", text }] : [];
  for (const file of chosen) {
    if (!uploaded.has(file)) {
      const form = new FormData();
      form.append("purpose", "user_data");
      form.append("file", file);
      const { "Content-Type": _, ...as } = headers(); // the browser sets it
      const response = await call("/v1/files", { method: "POST", headers: as, body: form, signal });
      if (!response.ok) {
        const refusal = await refusalOf(response);
        if ([400, 413, 415].includes(refusal.status)) refusal.message = file.name + ": " + refusal.message;
        throw refusal;
      }
      uploaded.set(file, (await response.json()).id);
    }
    parts.push({ type: "file", file: { file_id: uploaded.get(file) } });
  }
  return parts;
}

// answer shows one answer: that of request, which may upload files first. edit takes back a message that is refused. id
// is that of an answer in progress.
async function answer(request, current, retry, edit, id = "") {
  const turn = { id, box: addMessage("agent"), stopped: false, sent: false, controller: new AbortController() };
  running = turn;
  send.hidden = true;
  stop.hidden = false;
  stop.disabled = false;
  setStatus("The agent is answering …");
  turn.box.show("");
  turn.box.activity(thinking);
  turn.box.box.setAttribute("aria-busy", "true");
  try {
    await attach(request, turn, current);
    if (current === generation && (!running || running === turn)) setStatus("");
  } catch (problem) {
    // The turn of a lost connection goes on: to send its message again would begin another one.
    const again = turn.id && !(problem instanceof Refusal) ? () => start() : retry && (() => retry(problem));
    if (current === generation) ended(turn, problem, again, edit);
  } finally {
    turn.box.activity("");
    turn.box.flush();
    turn.box.box.removeAttribute("aria-busy");
    if (!turn.box.text && !turn.box.box.querySelector(".interrupted")) turn.box.remove();
    if (running === turn) {
      running = null;
      send.hidden = false;
      stop.hidden = true;
      if (!conversation.hidden) message.focus({ preventScroll: true });
    }
  }
}

// ended shows why an answer is not complete.
function ended(turn, problem, retry, edit) {
  if (turn.stopped && !turn.id) {
    setStatus("");
    if (turn.sent) turn.box.note("Stopped.", "Try again", retry); // the server may have the message
    else edit?.();
    return;
  }
  if (turn.stopped && ["cancelled", "interrupted"].includes(problem.code)) {
    setStatus("");
    turn.box.note("Stopped.");
    return;
  }
  if (problem.code === "file_not_found") { // an upload has expired, or belongs to another key
    uploaded = new WeakMap();
  } else if (problem.status === 404) { // the conversation is gone, or the invitation is used: the next message starts a new one
    store.removeItem("thread");
    store.removeItem("join");
  }
  if (problem.status === 401) {
    edit?.(); // the message waits for a new key
    return logout();
  }
  setStatus(problem.message, true);
  if (edit && !turn.id && [400, 413, 415].includes(problem.status)) { // it would be refused again
    turn.box.note("Not sent.", "Edit the message", edit);
    return;
  }
  turn.box.note("No complete answer.", retry ? "Try again" : "", retry);
}

function resume(execution, current) {
  const id = "chatcmpl-" + execution;
  return answer(() => attachRequest(id), current, () => start(), undefined, id);
}

async function submit(event) {
  event?.preventDefault();
  const text = message.value.trim(), chosen = attached;
  if (!text && !chosen.length || running && !running.waiting) return;
  message.value = "";
  setFiles([]);
  grow();
  const own = addMessage("user");
  own.show(text);
  own.flush();
  own.files(chosen.map((file) => ({ name: file.name, url: file.type.startsWith("image/") ? URL.createObjectURL(file) : "" })));
  follow(true);
  await deliver(text, chosen, generation, () => {
    own.remove();
    message.value = [text, message.value].filter(Boolean).join("\n");
    setFiles([...chosen, ...attached]);
    setStatus("");
    grow();
    message.focus();
  });
}

// deliver sends a message. When the connection breaks before the answer, the same request is sent again under the same
// key, so the message is answered once. So is a request after a server error, which a proxy may send for an accepted
// message. After another refusal it is a new request.
function deliver(text, chosen, current, edit) {
  let body, key;
  const request = async (turn) => {
    body ||= JSON.stringify({
      model: model(), stream: true, stream_options: { include_activity: true },
      messages: [{ role: "user", content: await upload(text, chosen, turn.controller.signal) }],
    });
    key ||= randomKey();
    turn.sent = true;
    const c = turn.controller, h = { ...headers(), "Idempotency-Key": key };
    return heard(call("/v1/chat/completions", { method: "POST", headers: h, body, signal: c.signal }), () => c.abort());
  };
  const retry = (problem) => {
    if (problem?.status < 500) body = key = undefined;
    return answer(request, current, retry, edit);
  };
  return retry();
}

stop.addEventListener("click", async () => {
  const turn = running;
  if (!turn) return;
  turn.stopped = stop.disabled = true;
  if (!turn.id) return turn.controller.abort();
  setStatus("Stopping …");
  try {
    const id = turn.id.replace("chatcmpl-", "resp_");
    const response = await call("/v1/responses/" + encodeURIComponent(id) + "/cancel", { method: "POST", headers: headers(), body: "{}" });
    if (!response.ok) throw await refusalOf(response);
  } catch (problem) {
    turn.stopped = stop.disabled = false;
    setStatus(problem.message, true);
  }
});

// --- Composer

function setStatus(text, isError = false) {
  statusLine.className = isError ? "note error" : "note";
  statusLine.textContent = text;
}

function fail(text, retry) {
  setStatus(text, true);
  if (!retry) return;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.textContent = "Try again";
  button.addEventListener("click", retry);
  statusLine.append(button);
}

function grow() {
  message.style.height = "auto";
  message.style.height = message.scrollHeight + 2 + "px";
}

function setFiles(list) {
  attached = list;
  attachments.hidden = !list.length;
  attachments.replaceChildren(...list.map((file) => {
    const li = document.createElement("li"), remove = document.createElement("button");
    li.textContent = "📎 " + file.name + " ";
    remove.type = "button";
    remove.className = "quiet";
    remove.textContent = "✕";
    remove.ariaLabel = "Remove " + file.name;
    remove.addEventListener("click", () => setFiles(attached.filter((other) => other !== file)));
    li.append(remove);
    return li;
  }));
}

function logout() {
  store.removeItem("key");
  byId("login-error").textContent = "This key is not valid, or no longer. Whoever gave it to you has the current one.";
  open();
}

// composes returns whether a key belongs to an input method. Safari ends the composition before the key that confirms
// it, and gives that key the code 229.
const composes = (event) => event.isComposing || event.keyCode === 229;

byId("composer").addEventListener("submit", submit);
message.addEventListener("input", grow);
message.addEventListener("keydown", (event) => {
  if (composes(event)) return;
  if (event.key === "Enter" && !event.shiftKey) submit(event);
  if (event.key === "Escape" && !stop.hidden && !running?.waiting) stop.click();
});
message.addEventListener("paste", (event) => {
  const pasted = [...event.clipboardData.files];
  if (pasted.length) {
    event.preventDefault();
    setFiles([...attached, ...pasted]);
  }
});
files.addEventListener("change", () => {
  setFiles([...attached, ...files.files]);
  files.value = "";
  message.focus();
});
for (const type of ["dragover", "dragleave", "drop"]) {
  conversation.addEventListener(type, (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    byId("composer").classList.toggle("over", type === "dragover");
    if (type === "drop") setFiles([...attached, ...event.dataTransfer.files]);
  });
}
login.addEventListener("submit", (event) => {
  event.preventDefault();
  store.setItem("key", byId("key").value.trim());
  byId("key").value = "";
  byId("login-error").textContent = "";
  open();
});
function startNew() {
  store.removeItem("thread");
  running?.controller.abort();
  running = null;
  send.hidden = false;
  stop.hidden = true;
  start();
  message.focus();
}
byId("new").addEventListener("click", startNew);
agents.addEventListener("change", () => {
  store.setItem("agent", agents.value);
  nameAgent(known.find((m) => m.id === agents.value));
  startNew(); // a conversation has one agent
});
byId("close").addEventListener("click", () => window.parent.postMessage({ chat: "close" }, "*"));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !composes(event) && options.get("embed") === "button" && (stop.hidden || running?.waiting)) byId("close").click();
});
window.addEventListener("online", () => { if (statusLine.textContent === unreachable) setStatus(""); });
window.addEventListener("hashchange", () => {
  const given = new URLSearchParams(location.hash.slice(1)); // the link to the message box changes the hash, too
  if (given.has("key") || given.has("join")) open();
});
applyTheme();
open();
