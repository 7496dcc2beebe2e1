"use strict";

// renderMarkdown returns Markdown as a fragment. Raw HTML stays text, images become links, and DOMPurify removes
// everything that is not in its lists.
const renderMarkdown = (() => {
  const parser = window.markdownit({ html: false, linkify: true, breaks: true });
  parser.renderer.rules.image = (tokens, i) => { // a loaded image would tell its server about the visitor
    const label = parser.utils.escapeHtml(tokens[i].content || "image");
    return `<a href="${parser.utils.escapeHtml(tokens[i].attrGet("src"))}">🖼 ${label}</a>`;
  };
  const allowed = {
    ALLOWED_TAGS: ["a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "li", "ol", "p", "pre", "s",
      "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
    ALLOWED_ATTR: ["href", "title", "start", "class"],
    ALLOWED_URI_REGEXP: /^(?:https?|mailto|tel):/i,
    RETURN_DOM_FRAGMENT: true,
  };

  // codeBlock adds the language and a copy button to a block of code.
  function codeBlock(pre) {
    const block = document.createElement("div"), bar = document.createElement("div");
    const language = document.createElement("span"), copy = document.createElement("button");
    const code = pre.querySelector("code");
    block.className = "block";
    bar.className = "bar";
    language.textContent = (code?.className || "").replace("language-", "");
    copy.type = "button";
    copy.className = "quiet";
    copy.textContent = "Copy";
    copy.addEventListener("click", async () => {
      copy.textContent = await copyText(pre.textContent) ? "Copied" : "Not copied";
      setTimeout(() => { copy.textContent = "Copy"; }, 2000);
    });
    bar.append(language, copy);
    pre.replaceWith(block);
    pre.tabIndex = 0;
    block.append(bar, pre);
  }

  // copyText copies text and returns whether it did. The clipboard needs HTTPS; without it the browser copies a selection.
  async function copyText(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      const copied = document.execCommand("copy");
      area.remove();
      return copied;
    }
  }

  return (text) => {
    const fragment = DOMPurify.sanitize(parser.render(text), allowed);
    for (const link of fragment.querySelectorAll("a")) {
      link.target = "_blank";
      link.rel = "noopener noreferrer nofollow";
    }
    fragment.querySelectorAll("pre").forEach(codeBlock);
    for (const table of fragment.querySelectorAll("table")) {
      const scroll = document.createElement("div");
      scroll.className = "scroll";
      scroll.tabIndex = 0;
      table.replaceWith(scroll);
      scroll.append(table);
    }
    for (const element of fragment.querySelectorAll("[class]")) {
      if (!["block", "bar", "scroll", "quiet"].includes(element.className)) element.removeAttribute("class");
    }
    for (const element of fragment.querySelectorAll("p, li, h1, h2, h3, h4, h5, h6, td, th")) element.dir = "auto";
    return fragment;
  };
})();
