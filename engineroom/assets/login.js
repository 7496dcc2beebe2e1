"use strict";
// A link from the terminal carries the token in its fragment, which no server is sent. It is taken out of the
// address before anything else happens, so that neither the history nor a bookmark keeps it.
const token = new URLSearchParams(location.hash.slice(1)).get("token");
if (token !== null) {
  history.replaceState(null, "", location.pathname + location.search);
  document.getElementById("token").value = token;
  document.getElementById("login").requestSubmit();
}
