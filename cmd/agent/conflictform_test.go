package main

import (
	"errors"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/memory"
)

// tab is an admin's browser, as far as forms go.
type tab struct {
	t      *testing.T
	base   string
	client *http.Client
}

func newTab(t *testing.T, base string) tab {
	t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	return tab{t, base, &http.Client{Jar: jar}}
}

// page is what a page says; with a form, after that was sent.
func (b tab) page(path string, form url.Values) string {
	b.t.Helper()
	method, body := http.MethodGet, io.Reader(http.NoBody)
	if form != nil {
		method, body = http.MethodPost, strings.NewReader(form.Encode())
	}
	r, err := http.NewRequestWithContext(b.t.Context(), method, b.base+path, body)
	if err != nil {
		b.t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="))
	if form != nil {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("Origin", b.base)
		r.Header.Set("Sec-Fetch-Site", "same-origin")
	}
	response, err := b.client.Do(r)
	if err != nil {
		b.t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		b.t.Fatalf("%s %s: %d, %v: %s", method, path, response.StatusCode, err, text)
	}
	return string(text)
}

// keepLate writes a key twice, and keeps a note that was based on the first as a conflict.
func keepLate(t *testing.T, pool *pgxpool.Pool) (conflict string) {
	t.Helper()
	for _, value := range []string{"first", "second"} {
		if _, err := memory.Save(t.Context(), pool, memory.Note{Key: "contact", Value: value, TraceID: "op_1"}); err != nil {
			t.Fatal(err)
		}
	}
	note := memory.Note{Key: "contact", Value: "the late one", Revision: 1, TraceID: "hb_1"}
	_, err := memory.Save(t.Context(), pool, note)
	found, refused := errors.AsType[*memory.ConflictError](err)
	if !refused {
		t.Fatal(err)
	}
	id, err := memory.KeepConflict(t.Context(), pool, note, found, "")
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// TestTwoAdminsInTwoBrowsersDecideOnWhatTheyWereShown sends the forms of pages that were opened before somebody else
// wrote.
func TestTwoAdminsInTwoBrowsersDecideOnWhatTheyWereShown(t *testing.T) {
	t.Parallel()
	database := pgtest.URL(t)
	p, pool := on(t, database, token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_HEARTBEAT_CRON=0 0 1 1 *", "AGENT_LOG_LEVEL=info"), connect(t, database)
	conflict := keepLate(t, pool)
	served := p.start("serve")
	base := strings.TrimSuffix(served.find(t, `msg=serving listen=(\S+)`), "/")
	ana, bea := newTab(t, base), newTab(t, base)
	contains(t, ana.page("/memory", nil), "the late one", "second", "/act/v1/memory/conflicts/"+conflict+"/decide", `name="if_revision" value="2"`)
	decide := func(b tab, decision, revision string) string {
		b.t.Helper()
		return b.page("/act/v1/memory/conflicts/"+conflict+"/decide",
			url.Values{"decision": {decision}, "reason": {"x"}, "if_revision": {revision}, "back": {"/memory"}})
	}
	holds := func(value string, revision int) {
		t.Helper()
		e, err := memory.Shared.Get(t.Context(), pool, "general", "contact")
		if err != nil || string(e.Value) != `"`+value+`"` || e.Revision != revision {
			t.Errorf("it holds %s at %d, want %s at %d, %v", e.Value, e.Revision, value, revision, err)
		}
	}
	p.must("memory", "set", "contact", "third") // after both have opened the page
	said := decide(ana, "take", "2")
	contains(t, said, `role="alert"`, "nothing was written", "the late one", "third", "revision 3 is there")
	holds("third", 3)
	contains(t, decide(ana, "take", "3"), "The conflict is decided.")
	holds("the late one", 4)
	contains(t, decide(bea, "take", "3"), "decided already")
	holds("the late one", 4)

	e, err := memory.Shared.Get(t.Context(), pool, "general", "contact")
	if err != nil {
		t.Fatal(err)
	}
	forget := func(b tab, revision string) string {
		b.t.Helper()
		return b.page("/act/v1/memory/"+e.ID+"/forget", url.Values{"reason": {"x"}, "if_revision": {revision}, "back": {"/memory"}})
	}
	contains(t, bea.page("/memory/contact", nil), `name="if_revision" value="4"`)
	p.must("memory", "set", "contact", "fifth")
	contains(t, forget(bea, "4"), "nothing was written", "fifth", "revision 5 is there")
	holds("fifth", 5)
	contains(t, forget(bea, "5"), "The entry is forgotten.")

	p.must("objectives", "add", "tidy", "--goal", "be tidy")
	contains(t, ana.page("/objectives/tidy", nil), `name="if_revision" value="1"`)
	p.must("objectives", "pause", "tidy")
	pause := url.Values{"reason": {"x"}, "if_revision": {"1"}, "back": {"/objectives"}}
	contains(t, ana.page("/act/v1/objectives/tidy/resume", pause), "nothing was done", "at revision 2 and not at 1")
	if status := p.must("objectives", "show", "tidy"); !strings.Contains(status, "paused") {
		t.Errorf("a page from before resumed it: %s", status)
	}
}
