// Package prompts keeps the exact prompt of each model call, for people who read its trace.
//
// A prompt is a list of parts: the definitions of the tools, and each message. A part is redacted first, as the
// activity log is, and stored once under the SHA-256 of the redacted text. A model call keeps the digests of its
// parts. So a conversation of 50 turns has each message once, and two calls show which parts they share.
//
// What it promises:
//
//   - No secret that the activity log would hide is stored. What only a provider reads (models.Opaque) is not either.
//   - Recording costs no round trip: its statements join the batches that open and end the call. Parts that this
//     process has stored on the same day are sent as digests alone.
//   - What is recorded is what was sent: in the form that the server takes, with the bound of tokens and the schema of
//     the answer. Of a call whose process is lost, it is what was to be sent.
//   - Recording fails no model call. Why it failed is logged.
//   - A part has at most [MaxPart] bytes. A larger one is cut and says so. Of a picture only size and digest are kept.
//
// Package retention deletes prompts by their own policy, and parts that no prompt has any more.
package prompts

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/models"
)

const (
	// MaxPart bounds a part, in bytes.
	MaxPart = 256 << 10
	// scanned bounds what is redacted of a part before it is cut.
	scanned = 8 << 20
	// maxKnown bounds how many parts a recorder knows to be stored.
	maxKnown = 8192
)

type digest = [sha256.Size]byte

// Recorder records prompts. The zero value is ready; it is safe for concurrent use.
type Recorder struct {
	mu    sync.Mutex
	day   int64             // of the parts in known, in days since 1970
	known map[digest]digest // by the digest of the part as it was, that of the part as it is stored
}

// Record is the prompt of one model call on its way to the database.
type Record struct {
	recorder *Recorder
	day      int64
	tools    []byte
	messages [][]byte
	options  json.RawMessage
	fresh    map[digest]digest // parts whose text is sent, as in Recorder.known

	digests   [][]byte
	bodies    []string
	truncated []bool

	missing int
	problem *string
}

// options are what a request says besides its messages and tools.
type options struct {
	Effort      string          `json:"effort,omitempty"`
	Temperature *float32        `json:"temperature,omitempty"`
	MaxTokens   int             `json:"max_tokens,omitempty"`
	Schema      string          `json:"schema,omitempty"` // its name
	Format      json.RawMessage `json:"response_format,omitempty"`
}

// maxFormat bounds the schema of an answer, in bytes.
const maxFormat = redact.DefaultLimit - 1024

// optionsOf are the options of a request.
func optionsOf(req models.Request) json.RawMessage {
	about := options{Effort: req.Effort, Temperature: req.Temperature, MaxTokens: req.MaxTokens}
	if req.Schema != nil {
		about.Schema, about.Format = req.Schema.Name, redact.JSON(req.Schema, maxFormat)
	}
	return redact.JSON(about, redact.DefaultLimit)
}

// Prepare redacts and hashes a request, as [models.Client.Prepared] has it.
func (r *Recorder) Prepare(req models.Request) *Record {
	p := &Record{
		recorder: r, day: time.Now().Unix() / (24 * 60 * 60), fresh: map[digest]digest{}, options: optionsOf(req),
	}
	if len(req.Tools) > 0 {
		p.tools = p.part(req.Tools)
	}
	p.messages = p.parts(req.Messages)
	return p
}

// parts are the digests of messages.
func (p *Record) parts(messages []models.Message) (list [][]byte) {
	for _, m := range messages {
		list = append(list, p.part(withoutPictures(m)))
	}
	return list
}

// part is the digest of a part as it is stored.
func (p *Record) part(v any) []byte {
	raw, err := json.Marshal(v)
	if err != nil { // parameters of a tool that are no JSON; redact says so
		raw = redact.JSON(v, MaxPart)
	}
	was := sha256.Sum256(raw)
	if stored, ok := p.recorder.stored(was, p.day); ok {
		return stored[:]
	}
	if stored, ok := p.fresh[was]; ok {
		return stored[:]
	}
	body := redact.JSON(json.RawMessage(raw), scanned)
	truncated := len(body) > MaxPart
	if truncated {
		body = redact.JSON(body, MaxPart)
	}
	stored := sha256.Sum256(body)
	p.fresh[was] = stored
	p.digests, p.bodies = append(p.digests, stored[:]), append(p.bodies, string(body))
	p.truncated = append(p.truncated, truncated)
	return stored[:]
}

// stored is the digest under which a part was stored on a day.
func (r *Recorder) stored(was digest, day int64) (digest, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.day != day || len(r.known) > maxKnown {
		r.day, r.known = day, nil
	}
	stored, ok := r.known[was]
	return stored, ok
}

// Add queues the statement that records the prompt. It must follow the one that opens the call's row.
func (p *Record) Add(b *pgx.Batch, executionID string, claim int64, step string) {
	p.missing, p.problem = 0, nil
	b.Queue(`
		select missing, problem from lanekeeper.record_agent_prompt(
		  (select o.activity_id from agent_activity_open o
		    where o.execution_id = @execution_id::uuid and o.claim = @claim and o.step = @step),
		  @tools, @messages, @options, @digests, @bodies, @truncated)`,
		postgres.Strict{
			"execution_id": executionID, "claim": claim, "step": step, "tools": p.tools, "messages": p.messages,
			"options": p.options,
			"digests": p.digests, "bodies": p.bodies, "truncated": p.truncated,
		}).QueryRow(func(row pgx.Row) error { return row.Scan(&p.missing, &p.problem) })
}

// Amend queues the statement that records how the request went out: with its bound of tokens, and in the form that the
// server took. It belongs into the transaction that ends the call's row. A prompt that cannot be amended stays as it
// was recorded before the call, and why is logged.
func (p *Record) Amend(ctx context.Context, log *slog.Logger, b *pgx.Batch, activityID string, sent models.Request) {
	a := &Record{recorder: p.recorder, day: p.day, fresh: maps.Clone(p.fresh)}
	if a.messages = a.parts(sent.Messages); slices.EqualFunc(a.messages, p.messages, bytes.Equal) {
		a.messages = nil
	}
	b.Queue(`
		select problem from lanekeeper.record_agent_prompt(@activity_id, null, @messages, @options, @digests, @bodies, @truncated, true)`,
		postgres.Strict{
			"activity_id": activityID, "messages": a.messages, "options": optionsOf(sent),
			"digests": a.digests, "bodies": a.bodies, "truncated": a.truncated,
		}).QueryRow(func(row pgx.Row) error {
		var problem *string
		err := row.Scan(&problem)
		if problem != nil {
			log.WarnContext(ctx, "prompt not amended", "error", *problem)
		}
		return err
	})
}

// Committed learns what is stored, after the batch. It logs why a prompt was not recorded.
func (p *Record) Committed(ctx context.Context, log *slog.Logger) {
	if p.problem != nil {
		log.WarnContext(ctx, "prompt not recorded", "error", *p.problem)
		return
	}
	r := p.recorder
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case p.missing > 0: // somebody deleted them: the next calls send all parts again
		r.known = nil
		log.WarnContext(ctx, "parts of a prompt not recorded", "missing", p.missing)
	case r.day == p.day:
		if r.known == nil {
			r.known = map[digest]digest{}
		}
		maps.Copy(r.known, p.fresh)
	}
}

// withoutPictures has of pictures in the message itself their type, size and digest.
func withoutPictures(m models.Message) models.Message {
	parts := slices.Clone(m.Parts)
	m = m.Shown()
	for i, p := range parts {
		if p.Image != nil && strings.HasPrefix(p.Image.URL, "data:") {
			kind, text, _ := strings.Cut(p.Image.URL, ",")
			data, err := base64.StdEncoding.DecodeString(text)
			if err != nil { // the server may take it all the same
				data = []byte(text)
			}
			p.Image = &models.Image{
				URL:    fmt.Sprintf("%s,[%d bytes, SHA-256 %x]", kind, len(data), sha256.Sum256(data)),
				Detail: p.Image.Detail,
			}
		}
		parts[i] = p
	}
	m.Parts = parts
	return m
}
