// Package prompts records the exact prompt of each model call, for readers of its trace.
//
// A prompt is a list of parts: the tools' definitions and each message. A part is redacted as the activity log is, and
// stored once under the SHA-256 of the redacted text. A model call stores the digests of its parts. A conversation
// stores each message once, and two calls show the parts that they share.
//
// Guarantees:
//
//   - A prompt has no secret that the activity log hides, and no opaque data of a provider (models.Opaque).
//   - Recording costs no round trip: its statements join the batches that open and end the call. A part that this
//     process stored on the same day is sent as its digest.
//   - The record is the request as sent, with its token limit and the schema of the answer. If the process is lost
//     during the call, it is the request as prepared.
//   - A failure to record is logged and fails no model call.
//   - A part has at most [MaxPart] bytes; a larger one is cut and marked. A picture is its size and digest.
//
// Package retention deletes old prompts, and parts without a prompt.
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
	// scanned bounds the redacted bytes of a part before the cut.
	scanned = 8 << 20
	// maxKnown bounds the stored parts that a recorder remembers.
	maxKnown = 8192
)

type digest = [sha256.Size]byte

// Recorder records prompts. The zero value is ready for use. It is safe for concurrent use.
type Recorder struct {
	mu    sync.Mutex
	day   int64             // of known, in days since 1970
	known map[digest]digest // digests of stored parts, by the digest before redaction
}

// Record is the prompt of one model call.
type Record struct {
	recorder *Recorder
	day      int64
	tools    []byte
	messages [][]byte
	options  json.RawMessage
	fresh    map[digest]digest // parts to store, as in Recorder.known

	digests   [][]byte
	bodies    []string
	truncated []bool

	missing int
	problem *string
}

// options are the settings of a request.
type options struct {
	Effort      string          `json:"effort,omitempty"`
	Temperature *float32        `json:"temperature,omitempty"`
	MaxTokens   int             `json:"max_tokens,omitempty"`
	Schema      string          `json:"schema,omitempty"` // its name
	Format      json.RawMessage `json:"response_format,omitempty"`
}

// maxFormat bounds the schema of an answer, in bytes.
const maxFormat = redact.DefaultLimit - 1024

func optionsOf(req models.Request) json.RawMessage {
	about := options{Effort: req.Effort, Temperature: req.Temperature, MaxTokens: req.MaxTokens}
	if req.Schema != nil {
		about.Schema, about.Format = req.Schema.Name, redact.JSON(req.Schema, maxFormat)
	}
	return redact.JSON(about, redact.DefaultLimit)
}

// Prepare redacts and hashes a request of [models.Client.Prepared].
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

// parts returns the digests of messages.
func (p *Record) parts(messages []models.Message) (list [][]byte) {
	for _, m := range messages {
		list = append(list, p.part(withoutPictures(m)))
	}
	return list
}

// part returns the digest of a redacted part.
func (p *Record) part(v any) []byte {
	raw, err := json.Marshal(v)
	if err != nil { // a tool's parameters are no JSON; redact describes them
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

// stored returns the digest of a part that was stored on a day.
func (r *Recorder) stored(was digest, day int64) (digest, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.day != day || len(r.known) > maxKnown {
		r.day, r.known = day, nil
	}
	stored, ok := r.known[was]
	return stored, ok
}

// Add queues the statement that records the prompt, after the one that opens the call's activity.
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

// Amend queues the statement that records the request as sent, in the transaction that ends the call's activity. It
// logs a failure, and the prompt stays as recorded before the call.
func (p *Record) Amend(ctx context.Context, log *slog.Logger, b *pgx.Batch, activityID string, sent models.Request) {
	a := &Record{recorder: p.recorder, day: p.day, fresh: maps.Clone(p.fresh)}
	if a.messages = a.parts(sent.Messages); slices.EqualFunc(a.messages, p.messages, bytes.Equal) {
		a.messages = nil
	}
	options := optionsOf(sent)
	if a.messages == nil && bytes.Equal(options, p.options) {
		return
	}
	b.Queue(`
		select problem from lanekeeper.record_agent_prompt(@activity_id, null, @messages, @options, @digests, @bodies,
		  @truncated, true)`,
		postgres.Strict{
			"activity_id": activityID, "messages": a.messages, "options": options,
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

// Committed remembers the stored parts after the batch, or logs the failure.
func (p *Record) Committed(ctx context.Context, log *slog.Logger) {
	if p.problem != nil {
		log.WarnContext(ctx, "prompt not recorded", "error", *p.problem)
		return
	}
	r := p.recorder
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case p.missing > 0: // stored parts were deleted: send all again
		r.known = nil
		log.WarnContext(ctx, "parts of a prompt not recorded", "missing", p.missing)
	case r.day == p.day:
		if r.known == nil {
			r.known = map[digest]digest{}
		}
		maps.Copy(r.known, p.fresh)
	}
}

// withoutPictures replaces embedded pictures by their type, size and digest.
func withoutPictures(m models.Message) models.Message {
	parts := slices.Clone(m.Parts)
	m = m.Shown()
	for i, p := range parts {
		if p.Image != nil && strings.HasPrefix(p.Image.URL, "data:") {
			kind, text, _ := strings.Cut(p.Image.URL, ",")
			data, err := base64.StdEncoding.DecodeString(text)
			if err != nil { // a server may accept it nevertheless
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
