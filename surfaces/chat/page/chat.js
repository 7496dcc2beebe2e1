"use strict";

// A chat with the agent over POST /v1/chat/completions. The conversation is kept by the server; this page has
// the key, the visitor's token and the thread's name, until the tab is closed.

const byId = (id) => document.getElementById(id);
const door = byId("door"), room = byId("room"), talk = byId("talk"), state = byId("state");
const message = byId("message"), files = byId("files"), send = byId("write").querySelector("button"), anew = byId("anew");
const store = window.sessionStorage;

class Refusal extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

function open() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.get("key")) store.setItem("key", given.get("key"));
  if (given.get("join")) { // into a conversation that somebody else began
    store.setItem("join", given.get("join"));
    store.removeItem("thread");
  }
  if (given.get("key") || given.get("join")) {
    history.replaceState(null, "", location.pathname); // out of sight and out of the history
  }
  const known = Boolean(store.getItem("key"));
  door.hidden = known;
  room.hidden = anew.hidden = !known;
  (known ? message : byId("key")).focus();
  if (known) greet();
}

// greet shows how the agent begins a new conversation. The server puts the same words at the beginning of the thread.
let conversation = 0;
async function greet() {
  const mine = ++conversation;
  if (store.getItem("thread") || store.getItem("join")) return;
  try {
    const response = await fetch("/v1/models/agent", { headers: { Authorization: "Bearer " + store.getItem("key") } });
    if (!response.ok) return; // the first message says what is wrong
    const { greeting } = await response.json();
    if (!greeting || mine !== conversation) return;
    talk.prepend(say("Agent", greeting).parentElement); // the visitor may have spoken meanwhile
  } catch { /* likewise */ }
}

function say(who, text) {
  const box = document.createElement("div");
  box.className = "said " + (who === "You" ? "mine" : "theirs");
  const name = document.createElement("span");
  name.className = "who";
  name.textContent = who;
  const words = document.createElement("span");
  words.textContent = text;
  box.append(name, words);
  talk.append(box);
  talk.scrollTop = talk.scrollHeight;
  return words;
}

// visitor is this visitor's token. It is made here, before it is sent: when the answer is lost, the invitation that was sent with it
// is still this visitor's.
function visitor() {
  if (!store.getItem("visitor")) {
    const random = String.fromCharCode(...crypto.getRandomValues(new Uint8Array(32)));
    store.setItem("visitor", "vis_" + btoa(random).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", ""));
  }
  return store.getItem("visitor");
}

function headers() {
  const h = { Authorization: "Bearer " + store.getItem("key"), "Content-Type": "application/json" };
  h["X-Visitor-Token"] = visitor();
  if (store.getItem("join")) h["X-Thread-Join"] = store.getItem("join");
  if (store.getItem("thread")) h["X-Thread-Id"] = store.getItem("thread");
  return h;
}

async function refused(response) {
  let text = "The server answers " + response.status + ".";
  try {
    text = (await response.json()).error.message || text;
  } catch { /* not in the protocol's form */ }
  const wait = response.headers.get("Retry-After");
  return new Refusal(response.status, wait && wait < 600 ? text + " Try again in " + wait + " s." : text);
}

// read shows a stream; it returns the completion's id, and whether the answer is whole.
async function read(response, words, turn) {
  if (response.headers.get("X-Visitor-Token")) store.setItem("visitor", response.headers.get("X-Visitor-Token"));
  if (!response.ok) throw await refused(response);
  store.removeItem("join");
  if (response.headers.get("X-Thread-Id")) store.setItem("thread", response.headers.get("X-Thread-Id"));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return false;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6).trim();
      if (data === "[DONE]") return true;
      const chunk = JSON.parse(data);
      if (chunk.error) throw Object.assign(new Refusal(200, chunk.error.message), { code: chunk.error.code });
      turn.id = chunk.id || turn.id;
      for (const choice of chunk.choices) text += choice.delta.content || "";
      if (text !== words.textContent) {
        words.textContent = text;
        talk.scrollTop = talk.scrollHeight;
      }
    }
  }
}

// upload stores files, and returns the content of a message with them.
async function upload(text, chosen) {
  if (!chosen.length) return text;
  const parts = text ? [{ type: "text", text }] : [];
  for (const file of chosen) {
    const form = new FormData();
    form.append("purpose", "user_data");
    form.append("file", file);
    const { "Content-Type": _, ...as } = headers(); // the browser says how the form is divided
    const response = await fetch("/v1/files", { method: "POST", headers: as, body: form });
    if (!response.ok) throw await refused(response);
    parts.push({ type: "file", file: { file_id: (await response.json()).id } });
  }
  return parts;
}

// follow reads the answer, and attaches again when the connection breaks: the answer is made all the same.
async function follow(content, words) {
  const turn = { id: "" };
  const body = JSON.stringify({ model: "agent", stream: true, messages: [{ role: "user", content }] });
  let ask = () => fetch("/v1/chat/completions", { method: "POST", headers: headers(), body });
  for (let tries = 0; ; tries++) {
    try {
      if (await read(await ask(), words, turn)) return;
    } catch (problem) {
      const again = !(problem instanceof Refusal) || ["shutting_down", "answer_restarted"].includes(problem.code) || problem.status === 503;
      if (!again || !turn.id || tries >= 8) throw problem;
    }
    if (!turn.id || tries >= 8) throw new Error("The connection broke. Please try again.");
    state.textContent = "The connection broke; attaching again …";
    await new Promise((go) => setTimeout(go, Math.min(500 * 2 ** tries, 8000)));
    ask = () => fetch("/v1/chat/completions/" + encodeURIComponent(turn.id) + "?stream=true", { headers: headers() });
  }
}

async function submit(event) {
  event.preventDefault();
  const text = message.value.trim(), chosen = [...files.files];
  if (!text && !chosen.length || send.disabled) return;
  say("You", [text, ...chosen.map((file) => "📎 " + file.name)].filter(Boolean).join("\n"));
  message.value = files.value = "";
  send.disabled = true;
  state.className = "note";
  state.textContent = "The agent is answering …";
  const words = say("Agent", "");
  words.parentElement.setAttribute("aria-busy", "true");
  try {
    await follow(await upload(text, chosen), words);
    state.textContent = "";
  } catch (problem) {
    state.className = "note error";
    state.textContent = problem.message;
    if (!words.textContent) words.parentElement.remove();
    if (problem.status === 404) { // the conversation is gone, or the invitation is used up: the next message begins a new one
      store.removeItem("thread");
      store.removeItem("join");
    }
    if (problem.status === 401) leave(problem.message);
  } finally {
    words.parentElement.removeAttribute("aria-busy");
    send.disabled = false;
    if (!room.hidden) message.focus();
  }
}

function leave(why) {
  store.removeItem("key");
  byId("door-error").textContent = why;
  open();
}

byId("write").addEventListener("submit", submit);
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
door.addEventListener("submit", (event) => {
  event.preventDefault();
  store.setItem("key", byId("key").value.trim());
  byId("key").value = "";
  byId("door-error").textContent = "";
  open();
});
anew.addEventListener("click", () => {
  store.removeItem("thread");
  talk.replaceChildren();
  state.textContent = "A new conversation.";
  greet();
  message.focus();
});
open();
