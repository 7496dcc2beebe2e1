package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// turnBench measures a visitor's messages to `agent serve` over HTTP, in its own process, with a model that streams
// tokens.
type turnBench struct {
	turns, openStreams int           // turns of each row; concurrent open streams
	answerDuration     time.Duration // duration of the model's answer
	pool               *pgxpool.Pool
	stderr             io.Writer

	release chan struct{} // closed when held answers continue
	holding atomic.Bool   // answers wait after their first token
	visitor atomic.Int64
}

// turnTokens is the number of tokens of an answer.
const turnTokens = 20

// turnKey is a chat key.
const turnKey = "2f6c8d1e0b7a4953a6d2c4e8f0b1937d"

type turnRow struct {
	callers      int
	model, floor samples // first token of the model alone; three commits
	first        samples // first token of the agent
	rate         float64 // turns/s
	transactions float64 // per turn
	wal          float64 // bytes per turn
	cpu          cpuTime // of all turns
}

func turn(ctx context.Context, args []string, out, stderr io.Writer) (err error) {
	b := turnBench{stderr: stderr, release: make(chan struct{})}
	flags := newFlags("turn", stderr)
	flags.IntVar(&b.turns, "n", 400, "turns of each row")
	flags.IntVar(&b.openStreams, "open", 1000, "concurrent open streams")
	flags.DurationVar(&b.answerDuration, "model", 100*time.Millisecond, "how long the model streams an answer")
	path := flags.String("agent", "", "the agent's binary; default: built from the current folder")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.turns < 1 || b.openStreams < 0 || b.answerDuration < 0 {
		return errors.New("turn: -n must be at least 1, -open and -model at least 0")
	}
	agent, err := buildAgent(ctx, *path, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, agent.remove()) }()
	model := httptest.NewServer(&b)
	defer model.Close()
	settings := []string{
		"OPENAI_BASE_URL=" + model.URL + "/v1", "OPENAI_MODEL=bench", "AGENT_CHAT_KEY=" + turnKey, "AGENT_CHAT_RATE=100000",
		"AGENT_LOG_LEVEL=warn",
	}
	return withServer(ctx, pgserver.Config{}, stderr, func(server *pgserver.Server) error {
		if b.pool, err = postgres.Open(ctx, server.URL(),
			postgres.Options{MaxConns: 34, ApplicationName: "bench"}); err != nil {
			return err
		}
		defer b.pool.Close()
		return agent.serve(ctx, server.URL(), settings, func(ctx context.Context, url string, pid int) error {
			return b.measure(ctx, url, model.URL, pid, out)
		})
	})
}

// measure measures the rows in sequence, then many open streams.
func (b *turnBench) measure(ctx context.Context, url, model string, pid int, out io.Writer) error {
	if err := createFloor(ctx, b.pool); err != nil {
		return err
	}
	fmt.Fprintln(b.stderr, "warm-up, 32 at once …")
	if _, err := b.sendMany(ctx, 32, 320, url+"/v1/chat/completions"); err != nil {
		return err
	}
	var rows []turnRow
	for _, callers := range []int{1, 8, 32} {
		fmt.Fprintf(b.stderr, "%d at once: %d turns …\n", callers, b.turns)
		row, err := b.measureRow(ctx, callers, url, model, pid)
		if err != nil {
			return err
		}
		rows = append(rows, row)
	}
	before := resident(pid)
	fmt.Fprintf(b.stderr, "%d streams at once …\n", b.openStreams)
	open, err := b.measureOpen(ctx, url, pid)
	if err != nil {
		return err
	}
	b.print(out, rows, before, open)
	return nil
}

// measureRow measures a number of concurrent callers: the model alone, three commits, and turns.
func (b *turnBench) measureRow(ctx context.Context, callers int, url, model string, pid int) (r turnRow, err error) {
	r.callers = callers
	if r.model, err = b.sendMany(ctx, callers, b.turns, model+"/v1/chat/completions"); err != nil {
		return r, err
	}
	r.floor = make(samples, b.turns)
	err = callAll(ctx, callers, b.turns, func(ctx context.Context, i int) error {
		began := time.Now()
		for range 3 {
			if err := updateFloor(ctx, b.pool, i%callers); err != nil {
				return err
			}
		}
		r.floor[i] = time.Since(began)
		return nil
	})
	if err != nil {
		return r, err
	}
	before, err := b.counters(ctx, pid)
	if err != nil {
		return r, err
	}
	began := time.Now()
	if r.first, err = b.sendMany(ctx, callers, b.turns, url+"/v1/chat/completions"); err != nil {
		return r, err
	}
	elapsed := time.Since(began)
	after, err := b.counters(ctx, pid)
	n := float64(b.turns)
	r.rate, r.cpu = n/elapsed.Seconds(), after.cpu.minus(before.cpu)
	r.transactions, r.wal = float64(after.transactions-before.transactions)/n, float64(after.wal-before.wal)/n
	return r, err
}

type turnCounters struct {
	transactions, wal int64
	cpu               cpuTime // own is the agent's
}

func (b *turnBench) counters(ctx context.Context, pid int) (c turnCounters, err error) {
	if err := pause(ctx, 1500*time.Millisecond); err != nil { // idle backends report their transactions within a second
		return c, err
	}
	if c.cpu, err = usedCPU(ctx, b.pool); err != nil {
		return c, err
	}
	if stat, ok := procStat(strconv.Itoa(pid)); ok {
		c.cpu.own = stat.cpu
	}
	err = b.pool.QueryRow(ctx, `
		select xact_commit + xact_rollback, pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint
		  from pg_stat_database where datname = current_database()`).Scan(&c.transactions, &c.wal)
	return c, err
}

// sendMany sends n messages, each of a new visitor, and returns the times until the first token.
func (b *turnBench) sendMany(ctx context.Context, callers, n int, url string) (samples, error) {
	latencies := make(samples, n)
	return latencies, callAll(ctx, callers, n, func(ctx context.Context, i int) (err error) {
		latencies[i], err = b.send(ctx, url, func() {})
		return err
	})
}

// send sends one message and calls began at the first token.
func (b *turnBench) send(ctx context.Context, url string, began func()) (first time.Duration, err error) {
	_, first, err = sendMessage(ctx, url, "word", map[string]any{
		"user":     fmt.Sprint("visitor-", b.visitor.Add(1)),
		"messages": []map[string]string{{"role": "user", "content": "Good morning. When do you open?"}},
	}, began)
	return first, err
}

// sendMessage posts a chat message and reads the streamed answer to its end. It returns the trace of the turn and the
// time until text with the prefix arrived. It calls started at that time.
func sendMessage(
	ctx context.Context, url, prefix string, body map[string]any, started func(),
) (traceID string, first time.Duration, err error) {
	body["model"], body["stream"] = agents.Alias, true
	encoded, err := json.Marshal(body)
	if err != nil {
		return "", 0, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(encoded))
	if err != nil {
		return "", 0, err
	}
	req.Header.Set("Authorization", "Bearer "+turnKey)
	start := time.Now()
	resp, err := chatClient.Do(req)
	if err != nil {
		return "", 0, fmt.Errorf("send message: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 500))
		return "", 0, fmt.Errorf("send message: status %d: %s", resp.StatusCode, text)
	}
	lines, done := bufio.NewScanner(resp.Body), false
	for lines.Scan() {
		if first == 0 && strings.Contains(lines.Text(), `"content":"`+prefix) {
			first = time.Since(start)
			started()
		}
		done = done || strings.Contains(lines.Text(), "[DONE]")
	}
	if err := lines.Err(); err != nil {
		return "", 0, fmt.Errorf("read answer: %w", err)
	}
	if first == 0 || !done {
		return "", 0, errors.New("the answer ended early")
	}
	return resp.Header.Get("X-Trace-Id"), first, nil
}

var chatClient = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}

// ServeHTTP is the model. It sends its first token at once.
func (b *turnBench) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var req openai.ChatCompletionRequest
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil || len(req.Messages) == 0 {
		http.Error(w, "bad request", http.StatusBadRequest)
		return
	}
	s := chatwire.Open(w, "chatcmpl-"+strconv.FormatInt(b.visitor.Add(1), 10), req.Model, time.Now().Unix())
	s.Role()
	for i := range turnTokens {
		s.Text(fmt.Sprint("word", i, " "))
		if b.holding.Load() {
			select {
			case <-b.release:
			case <-r.Context().Done():
			}
		} else if b.answerDuration > 0 && pause(r.Context(), b.answerDuration/turnTokens) != nil {
			return
		}
	}
	s.Finish(openai.FinishReasonStop)
	s.Usage(openai.Usage{PromptTokens: 100, CompletionTokens: turnTokens, TotalTokens: 100 + turnTokens})
	s.Done()
}

// measureOpen opens streams and reads the agent's memory when all have started.
func (b *turnBench) measureOpen(ctx context.Context, url string, pid int) (bytes int64, err error) {
	if b.openStreams == 0 {
		return resident(pid), nil
	}
	b.holding.Store(true)
	var group errgroup.Group
	begun := make(chan struct{}, b.openStreams)
	for range b.openStreams {
		group.Go(func() error {
			_, err := b.send(ctx, url+"/v1/chat/completions", func() { begun <- struct{}{} })
			return err
		})
	}
	for range b.openStreams {
		select {
		case <-begun:
		case <-time.After(time.Minute):
			err = errors.New("not all streams started within a minute")
		}
		if err != nil {
			break
		}
	}
	bytes = resident(pid)
	b.holding.Store(false)
	close(b.release)
	return bytes, errors.Join(err, group.Wait())
}

func (b *turnBench) print(out io.Writer, rows []turnRow, before, open int64) {
	var t strings.Builder
	fmt.Fprintf(&t, "`agent serve`, %d turns of new visitors in each row; the model streams %d tokens in %s; %d "+
		"processors. Times in ms.\n\n",
		b.turns, turnTokens, b.answerDuration, runtime.NumCPU())
	t.WriteString("| at once | model alone, first token p50, p99 | three commits p50, p99 | first token p50, p99 | " +
		"added to the model p50, p99 | turns/s | transactions | WAL | processor |\n")
	t.WriteString("|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range rows {
		fmt.Fprintf(&t, "| %d | %s, %s | %s, %s | %s, %s | %s, %s | %.0f | %.1f | %.1f kB | %s |\n", r.callers,
			millis(r.model.quantile(0.5)), millis(r.model.quantile(0.99)), millis(r.floor.quantile(0.5)),
			millis(r.floor.quantile(0.99)), millis(r.first.quantile(0.5)), millis(r.first.quantile(0.99)),
			millis(r.first.quantile(0.5)-r.model.quantile(0.5)), millis(r.first.quantile(0.99)-r.model.quantile(0.99)), r.rate,
			r.transactions, r.wal/1000, r.cpu.per(b.turns))
	}
	fmt.Fprintf(&t, "\n%d open streams: %.0f MB resident, %.0f before.\n", b.openStreams,
		float64(open)/1e6, float64(before)/1e6)
	fmt.Fprint(out, t.String())
}
