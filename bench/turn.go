package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
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

// turnBench measures what a visitor feels: one message to `agent serve` over HTTP, in a process of its own, whose
// model streams tokens.
type turnBench struct {
	turns, open int           // turns of each row; streams that are open at the same time
	streams     time.Duration // how long the model streams an answer
	pool        *pgxpool.Pool
	errw        io.Writer

	release chan struct{} // closed when held answers go on
	holding atomic.Bool   // answers wait after their first token
	visitor atomic.Int64
}

// turnTokens is how many tokens an answer has.
const turnTokens = 20

// turnKey is the key of the chat's clients.
const turnKey = "2f6c8d1e0b7a4953a6d2c4e8f0b1937d"

// turnRow is what one row of the table came to.
type turnRow struct {
	callers      int
	bare, floor  samples // first token of the model alone; three commits
	first        samples // first token of the agent
	each         float64 // turns/s
	transactions float64 // per turn
	wal          float64 // bytes per turn
	cpu          cpuTime // of all turns
}

func turn(ctx context.Context, args []string, out, errw io.Writer) (err error) {
	b := turnBench{errw: errw, release: make(chan struct{})}
	flags := flag.NewFlagSet("turn", flag.ContinueOnError)
	flags.SetOutput(errw)
	flags.IntVar(&b.turns, "n", 400, "turns of each row")
	flags.IntVar(&b.open, "open", 1000, "streams that are open at the same time")
	flags.DurationVar(&b.streams, "model", 100*time.Millisecond, "how long the model streams an answer")
	path := flags.String("agent", "", "the binary; empty to build it from the present folder")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.turns < 1 || b.open < 0 || b.streams < 0 {
		return errors.New("turn: -n is at least 1, -open and -model are not below 0")
	}
	agent, err := buildAgent(ctx, *path, errw)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, agent.remove()) }()
	server, err := pgserver.Start(ctx, pgserver.Config{Ephemeral: true, Durable: true, Progress: func(line string) { fmt.Fprintln(errw, line) }})
	if err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	if b.pool, err = postgres.Open(ctx, server.URL(), postgres.Options{MaxConns: 34, ApplicationName: "bench"}); err != nil {
		return err
	}
	defer b.pool.Close()
	model := httptest.NewServer(&b)
	defer model.Close()
	settings := []string{
		"OPENAI_BASE_URL=" + model.URL + "/v1", "OPENAI_MODEL=bench", "AGENT_CHAT_KEY=" + turnKey, "AGENT_CHAT_RATE=100000",
		"AGENT_LOG_LEVEL=warn",
	}
	return agent.serve(ctx, server.URL(), settings, func(ctx context.Context, url string, pid int) error {
		return b.measure(ctx, url, model.URL, pid, out)
	})
}

// measure takes one row after the other, then opens many streams.
func (b *turnBench) measure(ctx context.Context, url, model string, pid int, out io.Writer) error {
	if _, err := b.pool.Exec(ctx, `create table bench_floor (id int primary key, n bigint not null) with (fillfactor = 50);
		insert into bench_floor select g, 0 from generate_series(0, 99) g`); err != nil {
		return err
	}
	fmt.Fprintln(b.errw, "32 at once, until each connection has its plans …")
	if _, err := b.several(ctx, 32, 320, url+"/v1/chat/completions"); err != nil {
		return err
	}
	var rows []turnRow
	for _, callers := range []int{1, 8, 32} {
		fmt.Fprintf(b.errw, "%d at once: %d turns …\n", callers, b.turns)
		row, err := b.row(ctx, callers, url, model, pid)
		if err != nil {
			return err
		}
		rows = append(rows, row)
	}
	before := resident(pid)
	fmt.Fprintf(b.errw, "%d streams at once …\n", b.open)
	open, err := b.keepOpen(ctx, url, pid)
	if err != nil {
		return err
	}
	b.print(out, rows, before, open)
	return nil
}

// row measures so many callers at once: the model alone, three commits, turns.
func (b *turnBench) row(ctx context.Context, callers int, url, model string, pid int) (r turnRow, err error) {
	r.callers = callers
	if r.bare, err = b.several(ctx, callers, b.turns, model+"/v1/chat/completions"); err != nil {
		return r, err
	}
	r.floor = make(samples, b.turns)
	err = spread(ctx, callers, b.turns, func(ctx context.Context, i int) error {
		began := time.Now()
		for range 3 {
			if _, err := b.pool.Exec(ctx, `update bench_floor set n = n + 1 where id = @id`, postgres.Strict{"id": i % callers}); err != nil {
				return err
			}
		}
		r.floor[i] = time.Since(began)
		return nil
	})
	if err != nil {
		return r, err
	}
	before, err := b.read(ctx, pid)
	if err != nil {
		return r, err
	}
	began := time.Now()
	if r.first, err = b.several(ctx, callers, b.turns, url+"/v1/chat/completions"); err != nil {
		return r, err
	}
	lasted := time.Since(began)
	after, err := b.read(ctx, pid)
	n := float64(b.turns)
	r.each, r.cpu = n/lasted.Seconds(), after.cpu.minus(before.cpu)
	r.transactions, r.wal = float64(after.transactions-before.transactions)/n, float64(after.wal-before.wal)/n
	return r, err
}

// turnCounters are what was used so far.
type turnCounters struct {
	transactions, wal int64
	cpu               cpuTime // own is the agent's
}

func (b *turnBench) read(ctx context.Context, pid int) (c turnCounters, err error) {
	if err := pause(ctx, 1500*time.Millisecond); err != nil { // idle backends report their transactions within a second
		return c, err
	}
	if c.cpu, err = cpu(ctx, b.pool); err != nil {
		return c, err
	}
	if used, ok := procStat(strconv.Itoa(pid)); ok {
		c.cpu.own = used.used
	}
	err = b.pool.QueryRow(ctx, `
		select xact_commit + xact_rollback, pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint
		  from pg_stat_database where datname = current_database()`).Scan(&c.transactions, &c.wal)
	return c, err
}

// several has so many callers send n messages, each by a visitor of its own, and returns when the first token came.
func (b *turnBench) several(ctx context.Context, callers, n int, url string) (samples, error) {
	took := make(samples, n)
	return took, spread(ctx, callers, n, func(ctx context.Context, i int) (err error) {
		took[i], err = b.say(ctx, url, nil)
		return err
	})
}

// say sends one message and streams the answer to its end. It says when the first token came; began is called then.
func (b *turnBench) say(ctx context.Context, url string, began func()) (first time.Duration, err error) {
	body, err := json.Marshal(map[string]any{
		"model": agents.Alias, "stream": true, "user": fmt.Sprint("visitor-", b.visitor.Add(1)),
		"messages": []map[string]string{{"role": "user", "content": "Good morning. When do you open?"}},
	})
	if err != nil {
		return 0, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Authorization", "Bearer "+turnKey)
	start := time.Now()
	resp, err := turnClient.Do(req)
	if err != nil {
		return 0, fmt.Errorf("send message: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		said, _ := io.ReadAll(io.LimitReader(resp.Body, 500))
		return 0, fmt.Errorf("send message: status %d: %s", resp.StatusCode, said)
	}
	lines, done := bufio.NewScanner(resp.Body), false
	for lines.Scan() {
		if first == 0 && strings.Contains(lines.Text(), `"content":"word`) {
			first = time.Since(start)
			if began != nil {
				began()
			}
		}
		done = done || strings.Contains(lines.Text(), "[DONE]")
	}
	if err := lines.Err(); err != nil {
		return 0, fmt.Errorf("read answer: %w", err)
	}
	if first == 0 || !done {
		return 0, errors.New("read answer: it ended early")
	}
	return first, nil
}

// turnClient keeps as many connections as there are callers.
var turnClient = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}

// ServeHTTP is the model: it streams so many tokens, the first at once.
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
		} else if b.streams > 0 && pause(r.Context(), b.streams/turnTokens) != nil {
			return
		}
	}
	s.Finish(openai.FinishReasonStop)
	s.Usage(openai.Usage{PromptTokens: 100, CompletionTokens: turnTokens, TotalTokens: 100 + turnTokens})
	s.Done()
}

// keepOpen opens streams, reads the agent's memory when all have begun, and lets them end.
func (b *turnBench) keepOpen(ctx context.Context, url string, pid int) (bytes int64, err error) {
	if b.open == 0 {
		return resident(pid), nil
	}
	b.holding.Store(true)
	var group errgroup.Group
	begun := make(chan struct{}, b.open)
	for range b.open {
		group.Go(func() error {
			_, err := b.say(ctx, url+"/v1/chat/completions", func() { begun <- struct{}{} })
			return err
		})
	}
	for range b.open {
		select {
		case <-begun:
		case <-time.After(time.Minute):
			err = errors.New("open streams: not all of them began within a minute")
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

// resident is the memory of a process in bytes; 0 where the system does not say.
func resident(pid int) int64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0
	}
	pages, _ := strconv.ParseInt(fields[1], 10, 64)
	return pages * int64(os.Getpagesize())
}

// print writes the tables.
func (b *turnBench) print(out io.Writer, rows []turnRow, before, open int64) {
	var t strings.Builder
	ms := func(d time.Duration) string { return fmt.Sprintf("%.1f", d.Seconds()*1000) }
	fmt.Fprintf(&t, "`agent serve`, %d turns of new visitors in each row; the model streams %d tokens in %s; %d processors. Times in ms.\n\n",
		b.turns, turnTokens, b.streams, runtime.NumCPU())
	t.WriteString("| at once | model alone, first token p50, p99 | three commits p50, p99 | first token p50, p99 | later than the model's p50, p99 | turns/s | transactions | WAL | processor |\n")
	t.WriteString("|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range rows {
		fmt.Fprintf(&t, "| %d | %s, %s | %s, %s | %s, %s | %s, %s | %.0f | %.1f | %.1f kB | %s |\n", r.callers,
			ms(r.bare.at(0.5)), ms(r.bare.at(0.99)), ms(r.floor.at(0.5)), ms(r.floor.at(0.99)), ms(r.first.at(0.5)), ms(r.first.at(0.99)),
			ms(r.first.at(0.5)-r.bare.at(0.5)), ms(r.first.at(0.99)-r.bare.at(0.99)), r.each, r.transactions, r.wal/1000, r.cpu.per(b.turns))
	}
	fmt.Fprintf(&t, "\n%d open streams: %.0f MB resident, %.0f before.\n", b.open, float64(open)/1e6, float64(before)/1e6)
	fmt.Fprint(out, t.String())
}
