package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

// shopDay is a day of the order desk in examples/orders.
type shopDay struct {
	program     // the settings of serve, for commands
	db          *pgxpool.Pool
	shop        *pgxpool.Pool
	app         *app.App // for heartbeats and admins
	base        string
	promptCache promptCache
}

const shopVisitor = "visitor-41d6e8a90c7b2f35"

// newShopDay applies the example's workspace and serves it.
func newShopDay(t *testing.T, settings ...string) *shopDay {
	t.Helper()
	model, url, shop := modeltest.New(t), pgtest.URL(t), pgtest.EmptyURL(t)
	d := &shopDay{db: connect(t, url), shop: connect(t, shop)}
	d.promptCache.prompts, d.promptCache.counts = map[string][]string{}, map[string]cacheCount{}
	model.Handle(func(n int, req openai.ChatCompletionRequest) modeltest.Reply {
		one, err := d.promptCache.count(promptOf(req), model.Requests()[n].Body)
		if err != nil {
			return modeltest.Status(http.StatusBadRequest, 0)
		}
		return modelReply(req).WithUsage(one.prompt, 60, one.cached)
	})
	sql, err := os.ReadFile("../../examples/orders/shop.sql")
	if err == nil {
		_, err = d.shop.Exec(t.Context(), string(sql))
	}
	require.NoError(t, err)
	d.program = newProgram(t, url, slices.Concat([]string{
		token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info", "AGENT_CHAT_KEY=" + shopVisitor,
		"AGENT_CHAT_RATE=100000", "AGENT_HEARTBEAT_CRON=0 0 29 2 *", "OPENAI_API_KEY=sk-test",
		"OPENAI_BASE_URL=" + model.URL(), "AGENT_MODEL=gpt-5-mini", "SHOP_DATABASE_URL=" + shop,
	}, settings)...)
	d.must("apply", "../../examples/orders/workspace")
	d.base = d.start("serve").find(t, `msg=serving listen=(\S+)`)
	d.app = d.newApp()
	return d
}

// newApp returns the runtime that a command would build, for tests that act as one.
func (p program) newApp() *app.App {
	p.t.Helper()
	c := &cli{environ: config.Environ(p.environ), in: strings.NewReader(""), out: io.Discard, err: io.Discard}
	s, err := c.session(p.t.Context())
	require.NoError(p.t, err)
	p.t.Cleanup(func() { s.close(context.WithoutCancel(p.t.Context())) })
	model, _, stop, err := app.NewModel(p.t.Context(), s.config, s.log, models.Retry{})
	require.NoError(p.t, err)
	p.t.Cleanup(stop)
	a, err := c.app(s, model)
	require.NoError(p.t, err)
	return a
}

// heartbeat runs one of the day's 48 heartbeats after some order changes.
func (d *shopDay) heartbeat(ctx context.Context, n int, changes ...string) error {
	_, err := d.shop.Exec(ctx, `
		insert into orders (id, email, item, total, ordered_at, promised_on)
		values (2000 + $1::int, 'c' || $1::int || '@example.com', 'Chair', 80 + $1::int, now(),
		        current_date - $1::int % 3)`, n)
	if err != nil {
		return err
	}
	if _, err = d.shop.Exec(ctx, `update orders set sent_at = now() where id = 1996 + $1::int`, n); err != nil {
		return err
	}
	_, err = d.db.Exec(ctx, `
		update agent_automations set next_run_at = clock_timestamp() - interval '1 second' where name = any ($1)`,
		append(changes, "flag late orders"))
	if err != nil {
		return err
	}
	acting, err := d.app.Loop.Agents.Default(ctx, d.db)
	if err != nil {
		return err
	}
	x, err := d.app.Engine.RunSync(ctx, heartbeat.SpecOf(acting))
	if err == nil && (x.Status != executions.Completed || strings.Contains(x.ResultSummary, "failed")) {
		err = fmt.Errorf("heartbeat %d is %s: %s %s", n, x.Status, x.ResultSummary, postgres.Deref(x.ErrorMessage))
	}
	return err
}

// visitor runs a conversation with that many messages.
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

// admin runs a session with the messages.
func (d *shopDay) admin(ctx context.Context, messages ...string) error {
	s, err := d.app.Operate.Session("", true)
	if err != nil {
		return err
	}
	for _, words := range messages {
		if _, err := s.Turn(ctx, words, true, func(operate.Event) {}); err != nil {
			return err
		}
	}
	return s.Close(ctx)
}

// run runs the day: heartbeats all day, visitors from 9:30, an admin in the morning and one in the evening.
func (d *shopDay) run(ctx context.Context) error {
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

// runMorning runs some heartbeats, conversations of visitors, and the owner's first questions.
func (d *shopDay) runMorning(ctx context.Context) error {
	for n := range 3 {
		if err := errors.Join(d.heartbeat(ctx, n), d.visitor(ctx, n, 1+n)); err != nil {
			return err
		}
	}
	return d.admin(ctx, "Good morning. Which orders are late?")
}

// A provider's cache serves four fifths of the order desk's prompts on a typical day.
func TestPromptCacheOfTypicalDay(t *testing.T) {
	t.Parallel()
	d := newShopDay(t)
	require.NoError(t, d.app.RunWithLeases(t.Context(), d.run))
	for surface, count := range d.promptCache.counts {
		t.Logf("%-10s %s", surface, count)
	}
	all := d.promptCache.total()
	t.Logf("%-10s %s", "all", all)
	if all.percent(all.cached) < 80 {
		t.Errorf("%.1f %% of the day's tokens come from the cache, want 80 %%", all.percent(all.cached))
	}
	n := d.promptCache.counts["other"].calls
	assert.Truef(t, n == 0, "%d calls are of no surface that the test knows", n)
	n = d.promptCache.counts["reflection"].calls
	assert.Truef(t, n <= 20, "%d heartbeats asked the model to look back, want those after visitors and admins", n)
	var noted cacheCount
	err := d.db.QueryRow(t.Context(), `
		select count(*), sum(lanekeeper.agent_tokens(token_usage, 'prompt_tokens')),
		       sum(lanekeeper.agent_tokens(token_usage, 'cached_tokens'))
		  from agent_activity where kind = 'model'`).Scan(&noted.calls, &noted.prompt, &noted.cached)
	assert.Truef(t, err == nil && noted.calls == all.calls && noted.prompt == all.prompt && noted.cached == all.cached,
		"the log has %+v, want %+v (%v)", noted, all, err)
	report, err := d.automation(t.Context(), "flag late orders")
	assert.NoError(t, err)
	assert.Equal(t, 48, report)
}

// automation counts the successful runs of an automation.
func (d *shopDay) automation(ctx context.Context, name string) (runs int, err error) {
	err = d.db.QueryRow(ctx, `
		select count(*) from agent_automation_runs r join agent_automations a on a.id = r.automation_id
		 where a.name = $1 and r.status = 'success'`, name).Scan(&runs)
	return runs, err
}

// A provider caches prompts for a while. A shared prefix costs a tenth.
const (
	cacheFloor = 1024 // tokens: OpenAI caches no shorter prefix,
	cacheBlock = 128  // and counts in blocks of this size
	tokenBytes = 4    // average of English and JSON
)

// promptCache computes the cached tokens of each request.
type promptCache struct {
	mu      sync.Mutex
	prompts map[string][]string // earlier prompts, by model
	turns   int
	counts  map[string]cacheCount // by surface
}

// cacheCount counts tokens.
type cacheCount struct {
	calls, prompt int
	shared        int // prefix of an earlier prompt
	cached        int // the shared tokens that a provider with floor and blocks caches
}

func (c cacheCount) plus(d cacheCount) cacheCount {
	return cacheCount{c.calls + d.calls, c.prompt + d.prompt, c.shared + d.shared, c.cached + d.cached}
}

// percent returns the percentage of the prompt's tokens.
func (c cacheCount) percent(part int) float64 { return 100 * float64(part) / float64(max(c.prompt, 1)) }

func (c cacheCount) String() string {
	return fmt.Sprintf("%3d calls, %6d tokens, %4.1f %% shared, %4.1f %% cached", c.calls, c.prompt,
		c.percent(c.shared), c.percent(c.cached))
}

// promptClock matches the time in a prompt. The test's day takes seconds, so each turn gets its own minute.
var promptClock = regexp.MustCompile(`Now: \w+ \d{4}-\d\d-\d\d \d\d:\d\d`)

// count counts a request of a surface.
func (c *promptCache) count(surface, body string) (cacheCount, error) {
	var req struct {
		Model    string
		Format   json.RawMessage `json:"response_format"`
		Tools    json.RawMessage
		Messages []json.RawMessage
	}
	if err := json.Unmarshal([]byte(body), &req); err != nil {
		return cacheCount{}, err
	}
	var last struct{ Role string }
	if err := json.Unmarshal(req.Messages[len(req.Messages)-1], &last); err != nil {
		return cacheCount{}, err
	}
	text := string(req.Tools) + string(req.Format)
	for _, m := range req.Messages {
		text += string(m)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if last.Role == openai.ChatMessageRoleUser {
		c.turns++
	}
	text = promptClock.ReplaceAllString(text, fmt.Sprintf("Now: Wednesday 2026-11-25 %02d:%02d",
		c.turns/60%24, c.turns%60))
	longest := 0
	for _, earlier := range c.prompts[req.Model] {
		longest = max(longest, sharedBytes(text, earlier))
	}
	c.prompts[req.Model] = append(c.prompts[req.Model], text)
	one := cacheCount{calls: 1, prompt: len(text) / tokenBytes, shared: longest / tokenBytes}
	if one.shared >= cacheFloor {
		one.cached = one.shared / cacheBlock * cacheBlock
	}
	c.counts[surface] = c.counts[surface].plus(one)
	return one, nil
}

// sharedBytes returns the length of the common prefix.
func sharedBytes(a, b string) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

// total is the sum over the surfaces.
func (c *promptCache) total() (sum cacheCount) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, one := range c.counts {
		sum = sum.plus(one)
	}
	return sum
}

// promptOf returns the surface of a request, from the start of its system message.
func promptOf(req openai.ChatCompletionRequest) string {
	for words, surface := range map[string]string{
		"talk with a visitor": "visitors", "talk with your admin": "operate", "one scheduled task": "report",
		"look back on how": "reflection",
	} {
		if strings.Contains(req.Messages[0].Content, words) {
			return surface
		}
	}
	return "other"
}

// orderPattern matches a visitor's question about an order.
var orderPattern = regexp.MustCompile(`order (\d{4}).*e-mail is (\S+@\S+\w)`)

// damagePattern matches a visitor's report of a damaged order.
var damagePattern = regexp.MustCompile(`(?i)order (\d{4}) arrived damaged.*e-mail is (\S+@\S+\w)`)

// modelReply calls the order skill, then answers.
func modelReply(req openai.ChatCompletionRequest) modeltest.Reply {
	last := req.Messages[len(req.Messages)-1]
	text := modeltest.Said(last)
	order, damaged := orderPattern.FindStringSubmatch(text), damagePattern.FindStringSubmatch(text)
	switch {
	case promptOf(req) == "reflection":
		return modeltest.Text("Nothing out of the ordinary: all orders that were asked for were found.")
	case last.Role == openai.ChatMessageRoleTool:
		return modeltest.Text("I have looked it up. It was promised for the day that you see above, it has left our " +
			"warehouse, and the " +
			"carrier says that it is with you within two working days. Is there anything else that I can do for you?")
	case order != nil:
		return modeltest.ToolCall("order_status", fmt.Sprintf(`{"order":%s,"email":%q}`, order[1], order[2]))
	case damaged != nil:
		return modeltest.ToolCall("start_return", fmt.Sprintf(`{"order":%s,"email":%q}`, damaged[1], damaged[2]))
	case strings.Contains(text, "weekly report"):
		return modeltest.ToolCall("week_in_numbers", `{}`).AndCall("late_orders", `{}`)
	case strings.Contains(text, "are late"):
		return modeltest.ToolCall("late_orders", `{}`)
	case strings.Contains(text, "numbers"):
		return modeltest.ToolCall("week_in_numbers", `{}`)
	}
	return modeltest.Text("You can send it back within thirty days, in its box, and it costs you nothing. We collect it " +
		"at your " +
		"door on a day that suits you. A colleague decides about the refund when it is here.")
}
