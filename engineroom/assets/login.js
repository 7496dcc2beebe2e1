"use strict";
// A link from the terminal carries the token in its fragment, which no server is sent. It is taken out of the
// address before anything else happens, so that neither the history nor a bookmark keeps it.
const takeToken = () => {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token === null) return false;
  history.replaceState(null, "", location.pathname + location.search);
  document.getElementById("token").value = token;
  document.getElementById("login").requestSubmit();
  return true;
};
addEventListener("hashchange", takeToken); // the link may be pasted where this page is open already
// Who followed a link from another site comes without the cookie, although it is there: this page may use it.
if (!takeToken() && !document.getElementById("wrong") && !document.getElementById("login-link")) {
  fetch("/login", { method: "HEAD", cache: "no-store", redirect: "manual" }).then((answer) => {
    if (answer.type === "opaqueredirect") location.replace(document.querySelector("[name=next]").value);
  }).catch(() => { /* nobody answers: the form is there */ });
}
