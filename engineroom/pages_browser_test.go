package engineroom

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// populated puts something onto every page, with a text wherever one may stand, and answers with an address for each
// page's path.
func populated(t *testing.T, pool *pgxpool.Pool, text string) map[string]string {
	t.Helper()
	waitsForPeople(t, pool, text)
	did(t, pool, 60)
	id, _ := seedTrace(t, pool)
	spend(t, pool, text, "model-one", "0.75", "0")
	spend(t, pool, "reflect", "model-two", "0.25", "2 days")
	waiting := execution(t, pool, "waiting", "flow", "onboarding")
	for _, status := range []string{"pending", "running", "completed", "failed", "timeout", "cancelled"} {
		execution(t, pool, status, "chat", text)
	}
	asked(t, pool, "consumed", `{"table": "orders", "limit": 10}`, 5)
	approval := asked(t, pool, "pending", fmt.Sprintf(`{"table": "orders", "limit": 20, "why": %s}`, quoted(t, text)), 5)
	automation := scheduled(t, pool, "weekly")
	ran(t, pool, automation, "success")
	ran(t, pool, automation, "dead")
	delivery, message := delivered(t, pool, "dead", text), undelivered(t, pool, "shop", "dead")
	undelivered(t, pool, "shop", "pending")
	aims(t, pool, "grow")
	keeps(t, pool, "facts", "prices", text)
	acts(t, pool, agents.Definition{Name: "sales", Default: true, Description: text, Instructions: text, Greeting: text, Keys: []string{"web"}})
	acts(t, pool, agents.Definition{Name: "billing", Memory: "own", Instructions: text})
	called(t, pool, "fetch", "error", text, 3)
	called(t, pool, "fetch", "success", "", 9)
	spoken(t, pool, text, text, "completed")
	quiet(t, pool, `insert into agent_threads (id, channel, owner, participant, next_seq) values ('talk', 'chat', 'key1', $1, 3)`, text)
	quiet(t, pool, `
		insert into agent_messages (thread_id, seq, turn, role, content, status) values ('talk', 1, 1, 'user', $1, 'received'),
		       ('talk', 2, 1, 'assistant', $1, 'sent'), ('talk', null, null, 'assistant', $1, 'queued')`, text)
	quiet(t, pool, `
		insert into agent_locks (lane, locked_by, fencing_token, expires_at, execution_id) values
		       ('thread:talk', 'x', 1, now() + interval '1 hour', $1::uuid), ('pipeline:prices', 'somebody', 2, now() + interval '1 hour', null)`, waiting)
	return map[string]string{
		"/": "/", "/activity": "/activity", "/traces": "/traces", "/traces/{id}": "/traces/" + string(id), "/executions": "/executions",
		"/executions/{id}": "/executions/" + waiting, "/threads": "/threads", "/threads/{id}": "/threads/talk", "/approvals": "/approvals",
		"/approvals/{id}": "/approvals/" + approval, "/agents": "/agents", "/agents/{name}": "/agents/sales", "/skills": "/skills", "/skills/{name}": "/skills/fetch", "/automations": "/automations",
		"/automations/{name}": "/automations/weekly", "/objectives": "/objectives", "/objectives/{name}": "/objectives/grow",
		"/memory": "/memory", "/memory/{key...}": "/memory/prices", "/deliveries": "/deliveries", "/deliveries/{id}": "/deliveries/" + delivery,
		"/outgoing": "/outgoing", "/outgoing/{id}": "/outgoing/" + message, "/spend": "/spend", "/audit": "/audit", "/lanes": "/lanes", "/operate": "/operate",
	}
}

// quoted is a text as JSON.
func quoted(t *testing.T, text string) string {
	t.Helper()
	raw, err := json.Marshal(text)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// manners are the ways in which every page has to be fit to be read.
var manners = map[string]browser.Look{
	"light": {}, "dark": {Dark: true}, "light phone": {Width: 390, Height: 844}, "dark phone": {Width: 390, Height: 844, Dark: true},
}

// addresses are those of all pages of the room, so that a new one cannot be forgotten, and some more.
func addresses(t *testing.T, pool *pgxpool.Pool, made map[string]string) []string {
	t.Helper()
	room, err := New(Options{Pool: pool})
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, p := range room.pages {
		if made[p.path] == "" {
			t.Errorf("page %s is not tested: say where one is", p.path)
			continue
		}
		list = append(list, made[p.path])
	}
	trace := made["/traces/{id}"]
	return append(list, trace+"?view=tree", trace+"?view=table", "/login")
}

// fit looks at a page in some ways, and expects that axe finds nothing, that the browser has nothing to complain about,
// and that a page is no wider than the window.
func fit(t *testing.T, p *browser.Page, address string, ways ...string) {
	t.Helper()
	p.As(manners[ways[0]])
	p.Go(address)
	for _, way := range ways {
		look := manners[way]
		p.As(look)
		for _, fault := range p.Inaccessible() {
			t.Errorf("%s, %s: %s", address, way, fault)
		}
		var wide int64
		p.Eval(`document.documentElement.scrollWidth`, &wide)
		if most := max(look.Width, 390); look.Width > 0 && wide > most {
			t.Errorf("%s, %s: the page is %d wide", address, way, wide)
		}
	}
	for _, complaint := range p.Problems() {
		t.Errorf("%s: %s", address, complaint)
	}
}

// Both widths and both colour schemes are looked at, not each with each: the layout does not depend on the colours.
func TestEveryPageIsFitToBeReadInLightAndDarkAndOnAPhone(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	made := populated(t, pool, "It is done. See the list.")
	list := addresses(t, pool, made)
	p := browser.Open(t, browser.Look{})
	for _, address := range list {
		fit(t, p, server.URL+address, "light", "dark phone")
	}
	pictures(t, p, server.URL, made)
}

// pictures are those of the documentation, made where AGENT_PICTURES says (make pictures).
func pictures(t *testing.T, p *browser.Page, base string, made map[string]string) {
	t.Helper()
	dir := os.Getenv("AGENT_PICTURES")
	if dir == "" {
		return
	}
	for _, shot := range []struct{ name, page, way string }{
		{"overview", "/", "light"}, {"trace", "/traces/{id}", "light"}, {"approval", "/approvals/{id}", "dark"}, {"phone", "/activity", "dark phone"},
	} {
		p.As(manners[shot.way])
		p.Go(base + made[shot.page])
		p.Until("the page is live", `document.body.innerText.includes("Live")`)
		p.Screenshot(filepath.Join(dir, shot.name+".png"), false)
	}
}

func TestEveryPageShowsHostileTextAsText(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	text := hostile + strings.Repeat("W", 2000)
	list := addresses(t, pool, populated(t, pool, text))
	soil(t, pool, text+strings.Repeat("W", 1<<17))
	p := browser.Open(t, browser.Look{})
	for _, address := range list {
		fit(t, p, server.URL+address, "dark phone")
		var odd []string
		p.Eval(`[...document.querySelectorAll("script:not([src]), img, iframe, object, [onerror], [onload], [style]")].map(e => e.outerHTML.slice(0, 200))`, &odd)
		if len(odd) > 0 {
			t.Errorf("%s has elements that no template makes: %v", address, odd)
		}
		var trouble bool
		p.Eval(`document.querySelector(".trouble") !== null`, &trouble)
		if trouble {
			t.Errorf("%s: a part could not be read", address)
		}
	}
}

// soil writes a text into every column that holds free text or JSON, of every row, as far as the schema allows it. What
// pages are found by stays.
func soil(t *testing.T, pool *pgxpool.Pool, text string) {
	t.Helper()
	rows, err := pool.Query(t.Context(), `
		select c.table_name::text, c.column_name::text, c.data_type::text from information_schema.columns c join information_schema.tables t using (table_schema, table_name)
		 where c.table_schema = current_schema() and t.table_type = 'BASE TABLE' and c.table_name like 'agent\_%' and c.data_type in ('text', 'jsonb')
		   and c.is_generated = 'NEVER' and c.table_name !~ '^agent_(activity_\d|limits)'
		   and c.column_name !~ '^(id|name|key|kind|status|surface|role|channel|category|cause|trigger|queue|scope|trust|handler|lane|thread_id|skill_name|flow|endpoint|event|conversation_id|step|cron|timezone|.*trace_id|waiting_for|result_type|decided_by|token_usage|headers|outcome|body_sha256|.*hash)$'`)
	if err != nil {
		t.Fatal(err)
	}
	type column struct{ Table, Name, Type string }
	columns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[column])
	if err != nil {
		t.Fatal(err)
	}
	soiled := 0
	for _, c := range columns {
		value := "$1::text"
		if c.Type == "jsonb" {
			value = "jsonb_build_object(left($1::text, 300), $1::text, 'n', 1, 'list', jsonb_build_array($1::text))"
		}
		err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), `set local session_replication_role = replica`); err != nil {
				return err
			}
			_, err := tx.Exec(t.Context(), fmt.Sprintf("update %s set %s = %s", pgx.Identifier{c.Table}.Sanitize(), pgx.Identifier{c.Name}.Sanitize(), value), text)
			return err
		})
		switch {
		case err == nil:
			soiled++
		case !postgres.IsCode(err, "23514", "23505", "54000", "22001", "22P02"): // the schema does not allow it
			t.Fatalf("%s.%s: %v", c.Table, c.Name, err)
		}
	}
	if soiled < 40 {
		t.Fatalf("only %d of %d columns could be written", soiled, len(columns))
	}
}
