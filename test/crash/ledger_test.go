package crash_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// TestBudgetCoversProviderLog kills, pauses and stops processes at random moments while visitors talk and leave. The
// provider bills and logs each request that it accepts, even if the connection breaks. At every moment the budget has
// at least the billed amount. In the end each call's rows have exactly that, except amounts marked as unknown.
func TestBudgetCoversProviderLog(t *testing.T) {
	t.Parallel()
	moments := 25
	switch {
	case os.Getenv("AGENT_CRASH_ALL") != "":
		moments = 200
	case testing.Short():
		moments = 6
	}
	seed := rand.Uint64()
	t.Logf("%d moments, seed %d", moments, seed)
	x := newLedger(t, seed)
	talking := x.startVisitors(4)
	for n := range moments {
		x.randomFault(n)
		x.checkBudget()
	}
	x.resumePaused()
	talking()
	eventually(t, "everything has ended", func() bool {
		return pgtest.Value[bool](x.t, x.db, `select not exists (select from agent_executions where completed_at is null)`)
	})
	x.checkBudget()
	x.checkAmounts()
}

// ledger is a test environment with two processes and a billing provider.
type ledger struct {
	*testEnv
	random       *rand.Rand // used only by the test's own goroutine
	agents       [2]*agent
	paused       *agent
	mu           sync.Mutex // guards the fields below
	billed       map[string]int64
	total        int64
	unbounded    int // requests without a limit for the answer
	requests     int
	cancelVisits map[int]context.CancelFunc
}

func newLedger(t *testing.T, seed uint64) *ledger {
	t.Helper()
	x := &ledger{
		testEnv: newChatTestEnv(t), random: rand.New(rand.NewPCG(seed, 0)), billed: map[string]int64{},
		cancelVisits: map[int]context.CancelFunc{},
	}
	x.extraEnviron = append(x.extraEnviron, "AGENT_SHUTDOWN_TIMEOUT=500ms", `AGENT_PRICES={"scripted":{"input":1,"output":1}}`)
	x.model.Handle(func(n int, req openai.ChatCompletionRequest) modeltest.Reply {
		return x.providerReply(n, rand.New(rand.NewPCG(seed, uint64(n)+1)), x.model.Requests()[n].IdempotencyKey(), req)
	})
	for i := range x.agents {
		x.agents[i] = x.startServer("")
	}
	return x
}

// providerReply answers a request, or fails. It bills each request that it does not reject, for the whole answer, even
// if the client has left. It bills the first request and then breaks the connection, so each run has a request of
// unknown usage.
func (x *ledger) providerReply(n int, random *rand.Rand, key string, req openai.ChatCompletionRequest) modeltest.Reply {
	words := "All is well. " + strings.Repeat("It takes a while. ", random.IntN(40))
	prompt, answer := 0, len(words)/3
	for _, m := range req.Messages {
		prompt += 4 + len(m.Content)/3
	}
	for _, tool := range req.Tools {
		prompt += 4 + len(modeltest.Arguments(tool))/3
	}
	if n != 0 && random.IntN(12) == 0 {
		return modeltest.Status([]int{http.StatusTooManyRequests, http.StatusServiceUnavailable}[random.IntN(2)], 0)
	}
	x.mu.Lock()
	x.billed[key] += int64(prompt + answer)
	x.total += int64(prompt + answer)
	x.requests++
	if req.MaxTokens < answer { //nolint:staticcheck // the field of most servers
		x.unbounded++
	}
	x.mu.Unlock()
	if n == 0 {
		return modeltest.Reset()
	}
	reply := modeltest.Text(words)
	if newest := req.Messages[len(req.Messages)-1]; newest.Role == openai.ChatMessageRoleUser && random.IntN(2) == 0 {
		reply = reply.AndCall("look", `{}`)
	}
	switch random.IntN(12) {
	case 0:
		return modeltest.Status([]int{
			http.StatusInternalServerError, http.StatusBadGateway,
			http.StatusGatewayTimeout,
		}[random.IntN(3)], 0)
	case 1:
		return modeltest.CutStream(words)
	case 2:
		return modeltest.Reset()
	case 3:
		return modeltest.MidStreamError(words, "overloaded")
	case 4:
		return reply.NoUsage()
	}
	return reply.WithUsage(prompt, answer, 0).Slowly(time.Duration(random.IntN(20)) * time.Millisecond)
}

// startVisitors has visitors send one message after the other until the caller calls end.
func (x *ledger) startVisitors(visitors int) (end func()) {
	stop := make(chan struct{})
	var all sync.WaitGroup
	for v := range visitors {
		random := rand.New(rand.NewPCG(x.random.Uint64(), 0))
		all.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
					x.sendVisitorMessage(v, random, fmt.Sprintf("message %d of visitor %d", n, v))
				}
			}
		})
	}
	return func() {
		close(stop)
		all.Wait()
	}
}

// sendVisitorMessage sends a message and ignores the response.
func (x *ledger) sendVisitorMessage(v int, random *rand.Rand, words string) {
	ctx, leave := context.WithTimeout(x.ctx(), 20*time.Second)
	defer leave()
	x.mu.Lock()
	a := x.agents[random.IntN(2)]
	x.cancelVisits[v] = leave
	x.mu.Unlock()
	if !listens.MatchString(a.Err.String()) {
		return
	}
	m := message{fmt.Sprintf("visitor-%d", v), words, random.IntN(2) == 0}
	testkit.Chat(x.messageRequest(a, m).WithContext(ctx), nil)
}

// randomFault waits briefly, then acts on a process or a visitor.
func (x *ledger) randomFault(n int) {
	if !testkit.Wait(x.ctx(), time.Duration(x.random.IntN(300))*time.Millisecond) {
		return
	}
	x.resumePaused()
	i := x.random.IntN(2)
	a := x.agents[i]
	switch x.random.IntN(8) {
	case 0, 1, 2:
		x.t.Logf("%d: kill %s", n, a.pid())
		a.Kill()
		x.expireLease(a)
		x.replace(i)
	case 3, 4, 5:
		x.t.Logf("%d: pause %s", n, a.pid())
		a.Signal(syscall.SIGSTOP)
		x.expireLease(a)
		x.paused = a
	case 6:
		x.t.Logf("%d: stop %s", n, a.pid())
		a.Signal(syscall.SIGTERM)
		a.Exit()
		x.replace(i)
	case 7:
		x.mu.Lock()
		leave := x.cancelVisits[x.random.IntN(4)]
		x.mu.Unlock()
		if leave != nil {
			leave()
		}
	}
}

// resumePaused continues the paused process, which has lost its work by then.
func (x *ledger) resumePaused() {
	if x.paused != nil {
		x.paused.Signal(syscall.SIGCONT)
		x.paused = nil
	}
}

// replace starts another process in place of the i-th.
func (x *ledger) replace(i int) {
	a := x.startServer("")
	x.mu.Lock()
	defer x.mu.Unlock()
	x.agents[i] = a
}

// checkBudget checks that the budget has at least the amount billed so far.
func (x *ledger) checkBudget() {
	x.t.Helper()
	x.mu.Lock()
	billed := x.total
	x.mu.Unlock()
	counted := pgtest.Value[int64](x.t, x.db, `
		select coalesce(sum(tokens + reserved_tokens), 0)::bigint from agent_budgets where scope ~ '^day:[0-9-]+$'`)
	assert.Truef(x.t, counted >= billed, "the provider has billed %d tokens, the ledger has %d", billed, counted)
}

// checkAmounts checks the amounts of each call, and the sums.
func (x *ledger) checkAmounts() {
	x.t.Helper()
	x.mu.Lock()
	defer x.mu.Unlock()
	assert.Truef(x.t, x.requests != 0 && x.unbounded == 0,
		"%d of %d requests do not bound the answer", x.unbounded, x.requests)
	rows, err := x.db.Query(x.ctx(), `
		select idempotency_key, coalesce(sum((token_usage ->> 'total_tokens')::bigint), 0)::bigint,
		       coalesce(sum((token_usage ->> 'unknown_tokens')::bigint), 0)::bigint
		  from agent_activity where kind = 'model' group by 1`)
	require.NoError(x.t, err)
	defer rows.Close()
	var counted, unknown int64
	for rows.Next() {
		var key string
		var all, open int64
		require.NoError(x.t, rows.Scan(&key, &all, &open))
		billed := x.billed[key]
		assert.Truef(x.t, all >= billed && all-open <= billed,
			"call %s: the provider has billed %d tokens, the ledger has %d, %d of them unknown", key, billed, all, open)
		counted, unknown = counted+all, unknown+open
		delete(x.billed, key)
	}
	err = rows.Err()
	assert.Truef(x.t, err == nil && len(x.billed) == 0, "calls without a row: %v (%v)", x.billed, err)
	x.t.Logf("%d requests: billed %d tokens, counted %d, %d of them unknown", x.requests, x.total, counted, unknown)
	if got, want := pgtest.Value[string](x.t, x.db, `
		select concat_ws(' ', sum(tokens), sum(unknown_tokens), sum(reserved_tokens),
		                 bool_and(abs(cost_usd * 1000000 - tokens) < 1)::text)
		  from agent_budgets where scope ~ '^day:[0-9-]+$'`), fmt.Sprintf("%d %d 0 true", counted, unknown); got != want {
		x.t.Errorf("the budget has %s, the log %s", got, want)
	}
	assert.True(x.t, unknown != 0, "no request came to nothing")
}
