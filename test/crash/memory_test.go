package crash_test

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// TestNoMemoryIsLostOnKill has several writers add words to one memory: runs of two processes, heartbeats, two admins
// over HTTP and one on the command line. Meanwhile the processes die at random moments. Each writer adds to the value
// that it has read. In the end the value has once each word whose write was confirmed to its writer or recorded as
// confirmed. It has the note of each heartbeat too, or a recorded conflict has it, unless the engine gave up the
// heartbeat.
func TestNoMemoryIsLostOnKill(t *testing.T) {
	t.Parallel()
	rounds, moments := 1, 20
	switch {
	case os.Getenv("AGENT_CRASH_ALL") != "":
		rounds, moments = 12, 20
	case testing.Short():
		moments = 4
	}
	seed := rand.Uint64()
	t.Logf("%d moments, seed %d", rounds*moments, seed)
	x := newMemoryTest(t, seed)
	for round := range rounds {
		x.round(fmt.Sprintf("words%d", round), moments)
	}
}

const wordsYAML = `
kind: skill
name: look
handler: "http:GET %s/look"
---
kind: objective
name: notes
goal: Keep the notes.
steps: [Look after the notes]
---
kind: webhook
name: notes
scheme: bearer
secrets: ["${SHOP_SECRET}"]
actions:
  - prompt: "Add {body.word} to {body.key}."
    scopes: [internal]
`

// memoryTest is a test environment in which all writers share one memory.
type memoryTest struct {
	*testEnv
	random *rand.Rand // used only by the test's own goroutine

	mu             sync.Mutex // guards the fields below
	agents         [2]*agent
	key            string
	roundCtx       context.Context   // ends the writers
	confirmed      map[string]bool   // words whose write was confirmed to the writer
	heartbeatNotes map[string]string // words noted by heartbeats, with the key of one request of the run
	conflicts      int               // conflicts shown to models
}

func newMemoryTest(t *testing.T, seed uint64) *memoryTest {
	t.Helper()
	x := &memoryTest{
		testEnv: newIdleTestEnv(t, pgtest.URL(t), wordsYAML), random: rand.New(rand.NewPCG(seed, 0)),
		confirmed: map[string]bool{}, heartbeatNotes: map[string]string{},
	}
	x.extraEnviron = append(x.extraEnviron, "SHOP_SECRET="+hookSecret)
	x.model.Handle(func(n int, req openai.ChatCompletionRequest) modeltest.Reply {
		return x.modelReply(x.model.Requests()[n].IdempotencyKey(), req)
	})
	for i := range x.agents {
		x.agents[i] = x.startServer("")
	}
	return x
}

// round has all writers write one key while processes die, and checks the final value.
func (x *memoryTest) round(key string, moments int) {
	writing, end := context.WithCancel(x.ctx())
	defer end()
	x.mu.Lock()
	x.key, x.roundCtx = key, writing
	x.mu.Unlock()
	var writers sync.WaitGroup
	for n, write := range []func(r *rand.Rand, word string){
		x.runTurn, x.runTurn, x.runHeartbeat, x.addAsAdmin, x.addAsAdmin, x.addByCommand,
	} {
		random := rand.New(rand.NewPCG(x.random.Uint64(), 0))
		writers.Go(func() {
			for i := 0; writing.Err() == nil; i++ {
				write(random, fmt.Sprintf("w%dx%d", n, i))
			}
		})
	}
	for range moments {
		x.pause(x.random, 400)
		i := x.random.IntN(len(x.agents))
		x.agents[i].Kill()
		x.expireLease(x.agents[i])
		a := x.startServer("")
		x.mu.Lock()
		x.agents[i] = a
		x.mu.Unlock()
	}
	eventually(x.t, "everybody has written, a run has met a conflict and a heartbeat came too late", x.allCasesSeen)
	end()
	writers.Wait()
	x.waitEnded("")
	x.checkValue()
}

// allCasesSeen reports whether each case of the test has happened in this round.
func (x *memoryTest) allCasesSeen() bool {
	late := pgtest.Value[bool](x.t, x.db, `select exists (select from agent_memory_conflicts where key = $1)`, x.key)
	x.mu.Lock()
	defer x.mu.Unlock()
	return late && x.conflicts > 0 && len(x.confirmed) > 0 && len(x.heartbeatNotes) > 0
}

// checkValue compares the value with the confirmed words.
func (x *memoryTest) checkValue() {
	x.t.Helper()
	x.mu.Lock()
	defer x.mu.Unlock()
	there := strings.Fields(pgtest.Value[string](x.t, x.db, `select value #>> '{}' from agent_memory where key = $1`,
		x.key))
	rows, err := x.db.Query(x.ctx(), `select value #>> '{}' from agent_memory_conflicts where key = $1`, x.key)
	require.NoError(x.t, err)
	kept := map[string]bool{}
	for rows.Next() {
		var value string
		require.NoError(x.t, rows.Scan(&value))
		kept[lastWord(value)] = true
	}
	require.NoError(x.t, rows.Err())
	for word := range x.confirmed {
		assert.Truef(x.t, slices.Contains(there, word),
			"%s: the writer of %s heard that it is written, and it is gone", x.key, word)
	}
	for word, request := range x.heartbeatNotes {
		if written := slices.Contains(there, word); written == kept[word] && (written || !x.engineGaveUp(request)) {
			x.t.Errorf("%s: a heartbeat's note %s is in the value: %v, and among the conflicts: %v\n%s", x.key, word, written,
				kept[word], x.heartbeats())
		}
	}
	slices.Sort(there)
	once := slices.Compact(slices.Clone(there))
	assert.Truef(x.t, len(once) == len(there), "%s: a word was written twice: %v", x.key, there)
	x.t.Logf("%s: %d words are there, %d were heard of, %d were noted, %d are conflicts; models met %d conflicts",
		x.key, len(there), len(x.confirmed), len(x.heartbeatNotes), len(kept), x.conflicts)
	x.conflicts = 0
	clear(x.confirmed)
	clear(x.heartbeatNotes)
}

// engineGaveUp reports whether the engine gave up a run because too many processes died under it.
func (x *memoryTest) engineGaveUp(request string) bool {
	return pgtest.Value[bool](x.t, x.db, `
		select exists (select from agent_activity a join agent_executions x on x.id = a.execution_id
		                where a.idempotency_key = $1 and x.error_message like 'given up after%')`, request)
}

// heartbeats lists the heartbeats, for a failure.
func (x *memoryTest) heartbeats() string {
	return pgtest.Value[string](x.t, x.db, `
		select string_agg(concat_ws(' ', x.id, x.status, x.error_message, a.skill_name, a.status, a.step, a.input, a.output,
		                            a.error_message), e'\n' order by a.id)
		  from agent_executions x left join agent_activity a on a.trace_id = x.trace_id
		 where x.flow = 'heartbeat'`)
}

func lastWord(value string) string {
	all := strings.Fields(value)
	return all[len(all)-1]
}

func (x *memoryTest) confirm(word string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.confirmed[word] = true
}

// currentKey returns the key of this round, and the context that ends with it.
func (x *memoryTest) currentKey() (key string, over context.Context) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.key, x.roundCtx
}

// pause waits for a random time below most milliseconds, or until the round ends.
func (x *memoryTest) pause(r *rand.Rand, most int) {
	_, over := x.currentKey()
	testkit.Wait(over, time.Duration(r.IntN(most))*time.Millisecond)
}

// waitEnded waits until a run has ended; "" means all runs.
func (x *memoryTest) waitEnded(thread string) {
	eventually(x.t, "what was asked for has ended", func() bool {
		return pgtest.Value[bool](x.t, x.db, `
			select not exists (select from agent_executions x
			         where x.completed_at is null and ($1 = '' or x.id in (select d.execution_id from agent_webhook_deliveries d
			           where d.delivery_id = $1)))`, thread)
	})
}

// randomAgent returns a random process, or nil if it does not serve yet.
func (x *memoryTest) randomAgent(r *rand.Rand) *agent {
	x.mu.Lock()
	defer x.mu.Unlock()
	if a := x.agents[r.IntN(len(x.agents))]; listens.MatchString(a.Err.String()) {
		return a
	}
	return nil
}

// send makes a request; 0 means no response.
func (x *memoryTest) send(r *rand.Rand, method, path, secret, body string, header ...string) (status int, tag string,
	answer []byte,
) {
	a := x.randomAgent(r)
	if a == nil {
		x.pause(r, 20)
		return 0, "", nil
	}
	client := http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(x.newRequest(a, method, path, secret, body, header...))
	if err != nil {
		x.pause(r, 20)
		return 0, "", nil
	}
	defer func() { _ = response.Body.Close() }()
	if answer, err = io.ReadAll(response.Body); err != nil {
		return 0, "", nil
	}
	return response.StatusCode, response.Header.Get("ETag"), answer
}

// runTurn has a process run a turn of the model that adds a word. The sender repeats the request until it gets a
// response.
func (x *memoryTest) runTurn(r *rand.Rand, word string) {
	key, over := x.currentKey()
	body := modeltest.Arguments(map[string]string{"word": word, "key": key})
	for over.Err() == nil {
		if status, _, _ := x.send(r, http.MethodPost, "/webhooks/notes", hookSecret, body, "webhook-id",
			key+word); status/100 == 2 {
			x.waitEnded(key + word)
			return
		}
	}
}

// runHeartbeat has a process run a heartbeat.
func (x *memoryTest) runHeartbeat(r *rand.Rand, _ string) {
	pgtest.Exec(x.t, x.db, `update agent_objectives set due_at = clock_timestamp()`)
	id := x.requestHeartbeat()
	eventually(x.t, "the heartbeat ends", func() bool {
		return pgtest.Value[bool](x.t, x.db, `select completed_at is not null from agent_executions where id = $1`, id)
	})
	x.pause(r, 300)
}

// entry is a memory in an admin's response.
type entry struct {
	Value    string `json:"value"`
	Revision int    `json:"revision"`
}

// withWord returns the value with one more word; false if it has the word.
func (e entry) withWord(word string) (value string, more bool) {
	if slices.Contains(strings.Fields(e.Value), word) {
		return "", false
	}
	return strings.TrimSpace(e.Value + " " + word), true
}

// addAsAdmin adds a word over HTTP: it reads, writes based on that, and reads again until the value has the word.
func (x *memoryTest) addAsAdmin(r *rand.Rand, word string) {
	key, over := x.currentKey()
	path := "/v1/memory/entries/general/" + key
	for over.Err() == nil {
		status, tag, answer := x.send(r, http.MethodGet, path, adminToken, "")
		var there entry
		precondition := []string{"If-None-Match", "*"}
		switch {
		case status == http.StatusOK && json.Unmarshal(answer, &there) == nil:
			precondition = []string{"If-Match", tag}
		case status != http.StatusNotFound:
			continue
		}
		value, more := there.withWord(word)
		if !more {
			x.confirm(word)
			return
		}
		x.pause(r, 30)
		body := modeltest.Arguments(map[string]string{"value": value, "reason": "a test"})
		status, _, answer = x.send(r, http.MethodPut, path, adminToken, body, precondition...)
		switch status {
		case http.StatusOK:
			x.confirm(word)
			x.pause(r, 200)
			return
		case 0, http.StatusPreconditionFailed, http.StatusServiceUnavailable:
		default:
			x.t.Errorf("the write of %s is answered %d: %s", word, status, answer)
			return
		}
	}
}

// addByCommand adds a word with the command line. Some of its processes are killed.
func (x *memoryTest) addByCommand(r *rand.Rand, word string) {
	key, over := x.currentKey()
	for over.Err() == nil {
		get := x.startAgent("", "memory", "get", key, "--json")
		there, revision := entry{}, 0
		if get.Exit() == 0 {
			get.decode(&there)
			revision = there.Revision
		}
		value, more := there.withWord(word)
		if !more {
			x.confirm(word)
			return
		}
		set := x.startAgent("", "memory", "set", key, value, "--if-revision", strconv.Itoa(revision))
		if r.IntN(3) == 0 {
			x.pause(r, 300)
			set.Kill()
		}
		switch code := set.Exit(); {
		case code == 0:
			x.confirm(word)
			return
		case code > 0 && !strings.Contains(set.Err.String(), "nothing was written"):
			x.t.Errorf("the command ends with %d: %s", code, set.Err.String())
			return
		}
	}
}

var (
	asksFor = regexp.MustCompile(`Add "?(w\d+x\d+)"? to "?(words\d+)`)
	notes   = regexp.MustCompile(`"value":"([^"]*)"`)
)

// toolAnswer is the result of a tool.
type toolAnswer struct {
	Memories []entry `json:"memories"`
	Theirs   *entry  `json:"theirs"`
	Error    string  `json:"error"`
	Revision int     `json:"revision"`
}

// modelReply is the model. Its output depends only on its input, and on the key of the request. A repeated request has
// the same key.
func (x *memoryTest) modelReply(request string, req openai.ChatCompletionRequest) modeltest.Reply {
	if strings.Contains(req.Messages[0].Content, "You pursue one objective") {
		return x.heartbeatReply(request, req)
	}
	var word, key string
	for _, m := range req.Messages {
		if found := asksFor.FindStringSubmatch(m.Content); m.Role == openai.ChatMessageRoleUser && found != nil {
			word, key = found[1], found[2]
		}
	}
	if word == "" {
		return modeltest.Text("All is well.")
	}
	write := func(e entry) modeltest.Reply {
		value, more := e.withWord(word)
		if !more {
			x.confirm(word)
			return modeltest.Text("It is there.")
		}
		return modeltest.ToolCall("memory_write", modeltest.Arguments(map[string]string{"key": key, "value": value}))
	}
	answer := lastToolAnswer(req)
	switch {
	case answer == nil:
		return recallCall(key)
	case answer.Error == "conflict":
		x.mu.Lock()
		x.conflicts++
		x.mu.Unlock()
		if answer.Theirs == nil {
			return write(entry{})
		}
		return write(*answer.Theirs)
	case answer.Error != "":
		return recallCall(key)
	case answer.Revision > 0:
		x.confirm(word)
		return modeltest.Text("It is written.")
	case len(answer.Memories) == 0:
		return write(entry{})
	}
	return write(answer.Memories[0])
}

func recallCall(key string) modeltest.Reply {
	return modeltest.ToolCall("recall", modeltest.Arguments(map[string]string{"query": key}))
}

// lastToolAnswer returns the last tool result, or nil without one.
func lastToolAnswer(req openai.ChatCompletionRequest) *toolAnswer {
	m := req.Messages[len(req.Messages)-1]
	if m.Role != openai.ChatMessageRoleTool {
		return nil
	}
	var answer toolAnswer
	if json.Unmarshal([]byte(m.Content), &answer) != nil {
		answer.Error = "no JSON"
	}
	return &answer
}

// heartbeatReply is the model of a heartbeat. It notes a word, then usually waits until another writer has written. So
// the note mostly comes too late.
func (x *memoryTest) heartbeatReply(request string, req openai.ChatCompletionRequest) modeltest.Reply {
	key, over := x.currentKey()
	replies := 0
	for _, m := range req.Messages {
		if m.Role == openai.ChatMessageRoleAssistant {
			replies++
		}
		for _, call := range m.ToolCalls {
			if found := notes.FindStringSubmatch(call.Function.Arguments); call.Function.Name == "remember" && found != nil {
				x.mu.Lock()
				x.heartbeatNotes[lastWord(found[1])] = request
				x.mu.Unlock()
			}
		}
	}
	switch replies {
	case 0:
		return recallCall(key)
	case 1:
		there := entry{}
		if a := lastToolAnswer(req); a != nil && len(a.Memories) > 0 {
			there = a.Memories[0]
		}
		value, _ := there.withWord(fmt.Sprintf("h%x", crc32.ChecksumIEEE([]byte(request))))
		return modeltest.ToolCall("remember", modeltest.Arguments(map[string]string{
			"category": "general", "key": key,
			"value": value,
		}))
	}
	revision := func() (n int) {
		// at the end of the round, over cancels the query
		_ = x.db.QueryRow(over, `select coalesce(max(revision), 0) from agent_memory where key = $1`, key).Scan(&n)
		return n
	}
	for began := revision(); crc32.ChecksumIEEE([]byte(request))%4 > 0 && over.Err() == nil && revision() == began; {
		testkit.Wait(over, 20*time.Millisecond)
	}
	return modeltest.Text("The notes are kept.")
}
