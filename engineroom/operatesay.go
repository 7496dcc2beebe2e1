package engineroom

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
)

// operateLever takes the form of the page where no script does.
var operateLever = lever{
	"POST", "/v1/operate", []field{{"message", asText}, {"session_id", asText}, {"agent", asText}, {"wait", asFlag}}, "The agent has answered.",
}

// say takes a turn as a whole and shows the session with it. It lasts as long as the turn, at most until that waits for an
// approval.
func (room *Room) say(w http.ResponseWriter, r *http.Request) {
	if err := r.ParseForm(); err != nil {
		room.goBack(w, r, "/operate", flash{Text: "this is not the form of the console", Bad: true})
		return
	}
	back := sessionAt(strings.TrimSpace(r.PostForm.Get("session_id")))
	body, err := operateLever.body(r.PostForm)
	if err != nil {
		room.goBack(w, r, back, flash{Text: err.Error(), Bad: true})
		return
	}
	status, header, answer := room.call(r, operateLever, body)
	var done struct {
		SessionID string `json:"session_id"`
		Ended     string `json:"ended"`
	}
	if status == http.StatusUnauthorized {
		http.Redirect(w, r, "/login?next="+url.QueryEscape(back), http.StatusSeeOther)
		return
	}
	traceID := header.Get("X-Trace-Id")
	if status < http.StatusOK || status >= http.StatusMultipleChoices || json.Unmarshal(answer, &done) != nil {
		room.goBack(w, r, back, flash{Text: detail(status, answer), Bad: true, Trace: traceID})
		return
	}
	text := operateLever.done
	switch done.Ended {
	case "waiting_approval":
		text = "The turn waits for an approval. It goes on by itself when that is decided: see Approvals."
	case "handed_on":
		text = "The turn goes on in another process. Load the page again to see its answer."
	}
	room.goBack(w, r, sessionAt(done.SessionID), flash{Text: text, Trace: traceID})
}

// sessionAt is the address of a session; that of a new one when it has no id.
func sessionAt(id string) string {
	if id == "" {
		return "/operate"
	}
	return "/operate?session=" + url.QueryEscape(id)
}
