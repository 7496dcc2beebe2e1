package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

// shopDay is a day of the order desk in examples/orders.
type shopDay struct {
	t     *testing.T
	agent *pgxpool.Pool
	shop  *pgxpool.Pool
	app   *app // for heartbeats and admins
	base  string
	cache promptCache
}

const shopVisitor = "visitor-41d6e8a90c7b2f35"

// newShopDay applies the example's workspace and serves it.
func newShopDay(t *testing.T) *shopDay {
	t.Helper()
	model, url, shop := modeltest.New(t), pgtest.URL(t), pgtest.EmptyURL(t)
	d := &shopDay{t: t, agent: connect(t, url), shop: connect(t, shop)}
	d.cache.asked, d.cache.counts = map[string][]string{}, map[string]cacheCount{}
	model.Handle(func(n int, req openai.ChatCompletionRequest) modeltest.Reply {
		one, err := d.cache.ask(askedBy(req), model.Requests()[n].Body)
		if err != nil {
			return modeltest.Status(http.StatusBadRequest, 0)
		}
		return staffed(req).WithUsage(one.prompt, 60, one.cached)
	})
	sql, err := os.ReadFile("../../examples/orders/shop.sql")
	if err == nil {
		_, err = d.shop.Exec(t.Context(), string(sql))
	}
	if err != nil {
		t.Fatal(err)
	}
	p := on(t, url, token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info", "AGENT_CHAT_KEY="+shopVisitor,
		"AGENT_CHAT_RATE=100000", "AGENT_HEARTBEAT_CRON=0 0 29 2 *", "OPENAI_API_KEY=sk-test",
		"OPENAI_BASE_URL="+model.URL(), "AGENT_MODEL=gpt-5-mini", "SHOP_DATABASE_URL="+shop)
	p.must("apply", "../../examples/orders/workspace")
	d.base = p.start("serve").find(t, `msg=serving listen=(\S+)`)
	d.app = p.wired()
	return d
}

// wired is the runtime that a command has, for tests that are one.
func (p program) wired() *app {
	p.t.Helper()
	c := &cli{environ: config.Environ(p.environ), in: strings.NewReader(""), out: io.Discard, err: io.Discard}
	s, err := c.session(p.t.Context())
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { s.close(context.WithoutCancel(p.t.Context())) })
	model, _, stop, err := newModel(p.t.Context(), s.config, s.log, models.Retry{})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(stop)
	a, err := c.app(s, model)
	if err != nil {
		p.t.Fatal(err)
	}
	return a
}

// heartbeat is one of the 48 of a day: orders have come and gone meanwhile.
func (d *shopDay) heartbeat(ctx context.Context, n int, also ...string) error {
	_, err := d.shop.Exec(ctx, `
		insert into orders (id, email, item, total, ordered_at, promised_on)
		values (2000 + $1::int, 'c' || $1::int || '@example.com', 'Chair', 80 + $1::int, now(), current_date - $1::int % 3)`, n)
	if err != nil {
		return err
	}
	if _, err = d.shop.Exec(ctx, `update orders set sent_at = now() where id = 1996 + $1::int`, n); err != nil {
		return err
	}
	_, err = d.agent.Exec(ctx, `
		update agent_automations set next_run_at = clock_timestamp() - interval '1 second' where name = any ($1)`,
		append(also, "flag late orders"))
	if err != nil {
		return err
	}
	acting, err := d.app.loop.Agents.Default(ctx, d.agent)
	if err != nil {
		return err
	}
	x, err := d.app.engine.RunNow(ctx, heartbeat.SpecOf(acting))
	if err == nil && (x.Status != executions.Completed || strings.Contains(x.ResultSummary, "failed")) {
		err = fmt.Errorf("heartbeat %d is %s: %s %s", n, x.Status, x.ResultSummary, deref(x.ErrorMessage))
	}
	return err
}

// visitor has a conversation of some messages.
func (d *shopDay) visitor(ctx context.Context, n, messages int) error {
	for i := range messages {
		words := []string{
			fmt.Sprintf("Hello, where is my order %d? My e-mail is c%d@example.com", 2000+n, n),
			"And if I do not like it when it is here, what does it cost to send it back?",
			fmt.Sprintf("I see. There is another one, order %d, and my e-mail is c%d@example.com for it, too.", 2001+n, n+1),
			"Can somebody carry it up to the third floor? There is no lift in our house.",
			fmt.Sprintf("Please look again for order %d, the e-mail is c%d@example.com", 2000+n, n),
			"Thank you, that is all that I wanted to know.",
		}[i]
		body := modeltest.Arguments(map[string]any{
			"model": "orderdesk", "metadata": map[string]string{"thread_id": fmt.Sprintf("visitor %d", n)},
			"messages": []map[string]string{{"role": "user", "content": words}},
		})
		got := send(ctx, http.MethodPost, d.base+"/v1/chat/completions", shopVisitor, body)
		if got.err != nil {
			return got.err
		}
		if got.status != http.StatusOK {
			return fmt.Errorf("visitor %d got %d %s", n, got.status, got.body)
		}
	}
	return nil
}

// admin has a session in which some things are said.
func (d *shopDay) admin(ctx context.Context, said ...string) error {
	s, err := d.app.operate.Session("", true)
	if err != nil {
		return err
	}
	for _, words := range said {
		if _, err := s.Turn(ctx, words, true, func(operate.Event) {}); err != nil {
			return err
		}
	}
	return s.Close(ctx)
}

// pass lets the day pass: heartbeats all day long, visitors from 9:30 on, an admin in the morning and one in the evening.
func (d *shopDay) pass(ctx context.Context) error {
	visitors := 0
	for n := range 48 {
		var also []string
		if n == 16 {
			also = []string{"weekly report"}
		}
		if err := d.heartbeat(ctx, n, also...); err != nil {
			return err
		}
		var err error
		switch {
		case n == 18:
			err = d.admin(ctx, "Good morning. Which orders are late?", "Whose are they, and since when?",
				"And the week in numbers, please.", "Which orders are late that were promised for last week?", "Thank you.")
		case n == 38:
			err = d.admin(ctx, "How did today go? Give me the numbers.", "Which orders are late now?", "Good night.")
		case n > 18 && n%2 == 1:
			err = d.visitor(ctx, visitors, 3+visitors%4)
			visitors++
		}
		if err != nil {
			return err
		}
	}
	if visitors < 15 {
		return fmt.Errorf("%d visitors came", visitors)
	}
	return nil
}

// Of what the order desk asks a model on a typical day, a provider's cache serves four fifths.
func TestATypicalDayIsServedFromThePromptCache(t *testing.T) {
	t.Parallel()
	d := newShopDay(t)
	if err := d.app.beat(t.Context(), d.pass); err != nil {
		t.Fatal(err)
	}
	for surface, count := range d.cache.counts {
		t.Logf("%-10s %s", surface, count)
	}
	all := d.cache.all()
	t.Logf("%-10s %s", "all", all)
	if all.percent(all.cached) < 80 {
		t.Errorf("%.1f %% of the day's tokens come from the cache, want 80 %%", all.percent(all.cached))
	}
	if n := d.cache.counts["other"].calls; n > 0 {
		t.Errorf("%d calls are of no surface that the test knows", n)
	}
	if n := d.cache.counts["reflection"].calls; n > 20 {
		t.Errorf("%d heartbeats asked the model to look back, want those after visitors and admins", n)
	}
	var noted cacheCount
	err := d.agent.QueryRow(t.Context(), `
		select count(*), sum(lanekeeper.agent_tokens(token_usage, 'prompt_tokens')), sum(lanekeeper.agent_tokens(token_usage, 'cached_tokens'))
		  from agent_activity where kind = 'model'`).Scan(&noted.calls, &noted.prompt, &noted.cached)
	if err != nil || noted.calls != all.calls || noted.prompt != all.prompt || noted.cached != all.cached {
		t.Errorf("the log has %+v, want %+v (%v)", noted, all, err)
	}
	report, err := d.automation(t.Context(), "flag late orders")
	if err != nil || report != 48 {
		t.Errorf("late orders were flagged %d times, %v", report, err)
	}
}

// automation counts the runs of one that succeeded.
func (d *shopDay) automation(ctx context.Context, name string) (runs int, err error) {
	err = d.agent.QueryRow(ctx, `
		select count(*) from agent_automation_runs r join agent_automations a on a.id = r.automation_id
		 where a.name = $1 and r.status = 'success'`, name).Scan(&runs)
	return runs, err
}
