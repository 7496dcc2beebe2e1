"use strict";

// Adds the chat page of this server to another site, in an iframe that keeps its own origin:
//
//   <script src="https://agent.example/chat/embed.js" data-key="CHAT_KEY" async></script>
//
// data-agent, data-theme (light, dark), data-accent (a colour), data-radius (a length) and data-label change its look.
// data-target, a selector, shows the chat in that element instead of behind a button. AGENT_CHAT_EMBED_ORIGINS must
// name the site.
(() => {
  const script = document.currentScript, options = script.dataset;
  const origin = new URL(script.src).origin;
  const query = new URLSearchParams({ embed: options.target ? "inline" : "button" });
  for (const name of ["agent", "theme", "accent", "radius"]) {
    if (options[name]) query.set(name, options[name]);
  }
  const frame = document.createElement("iframe");
  frame.title = options.label || "Chat";
  frame.referrerPolicy = "no-referrer";
  frame.sandbox = "allow-scripts allow-same-origin allow-forms allow-popups allow-popups-to-escape-sandbox allow-downloads";
  frame.allow = "clipboard-write " + origin;
  const source = origin + "/chat?" + query + (options.key ? "#key=" + encodeURIComponent(options.key) : "");

  const sheet = new CSSStyleSheet();
  sheet.replaceSync(`
    :host { all: initial; }
    iframe { border: 1px solid #8a929d; border-radius: .75rem; background: Canvas; color-scheme: normal; }
    .button iframe {
      position: fixed; z-index: 2147483646; inset-block-end: 5rem; inset-inline-end: 1rem; width: min(26rem, calc(100vw - 2rem));
      height: min(var(--height, 32rem), calc(100dvh - 7rem)); box-shadow: 0 .5rem 2rem rgb(0 0 0 / .25);
    }
    .inline iframe { width: 100%; height: clamp(20rem, var(--height, 24rem), var(--max-height, 40rem)); }
    button {
      position: fixed; z-index: 2147483646; inset-block-end: 1rem; inset-inline-end: 1rem; min-height: 3rem; padding: 0 1.25rem; border: none;
      border-radius: 1.5rem; font: 600 1rem system-ui, sans-serif; background: var(--accent, #1d4fb8); color: var(--on-accent, #fff); cursor: pointer;
    }
    button:focus-visible { outline: 3px solid; outline-offset: 2px; }
    [hidden] { display: none; }
  `);
  const host = document.createElement("div"), root = host.attachShadow({ mode: "open" }), box = document.createElement("div");
  root.adoptedStyleSheets = [sheet];
  root.append(box);
  if (options.accent && CSS.supports("color", options.accent)) {
    box.style.setProperty("--accent", options.accent);
    box.style.setProperty("--on-accent", isLight(options.accent) ? "#000" : "#fff");
  }

  function isLight(color) { // as chat.js has it
    const context = document.createElement("canvas").getContext("2d");
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b] = context.getImageData(0, 0, 1, 1).data;
    return 0.299 * r + 0.587 * g + 0.114 * b > 150;
  }

  function start() {
    if (options.target) {
      box.className = "inline";
      frame.src = source;
      box.append(frame);
      const target = document.querySelector(options.target);
      if (!target) {
        console.error("chat: no element matches data-target", options.target);
        return;
      }
      target.append(host);
      return;
    }
    box.className = "button";
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = options.label || "Chat";
    button.ariaExpanded = "false";
    frame.hidden = true;
    button.addEventListener("click", () => show(frame.hidden));
    box.append(frame, button);
    document.body.append(host);

    function show(open) {
      if (open && !frame.src) frame.src = source;
      frame.hidden = !open;
      button.ariaExpanded = String(open);
      (open ? frame : button).focus();
    }
    window.addEventListener("message", (event) => {
      if (fromFrame(event) && event.data.chat === "close") show(false);
    });
  }

  const fromFrame = (event) => event.origin === origin && event.source === frame.contentWindow && event.data;
  window.addEventListener("message", (event) => {
    if (fromFrame(event) && event.data.chat === "height" && Number.isFinite(event.data.height)) {
      box.style.setProperty("--height", Math.round(event.data.height) + "px");
    }
  });
  if (document.readyState !== "loading") start(); // before, the target may be missing
  else document.addEventListener("DOMContentLoaded", start);
})();
