// Package prompts records the exact prompt of each model call, for readers of its trace.
//
// A prompt is a list of parts: the tools' definitions and each message. A part is redacted as the activity log is, and
// stored once under the SHA-256 of the redacted text. A model call stores the digests of its parts. A conversation
// stores each message once, and two calls share the parts that they have in common.
//
// Guarantees:
//
//   - A prompt has no secret that the activity log hides, and no opaque data of a provider (models.Opaque).
//   - Recording costs no round trip: its statements join the batches that open and end the call. A part that this
//     process stored on the same day is sent as its digest.
//   - The record is the request as sent, with its token limit and the schema of the answer. If the process is lost
//     during the call, it is the request as prepared.
//   - A failure to record is logged and fails no model call.
//   - A part has at most [MaxPart] bytes; a larger part is truncated and marked. An embedded image is recorded as its
//     size and digest.
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
	// maxRedacted bounds the redacted bytes of a part before the cut.
	maxRedacted = 8 << 20
	// maxKnownParts bounds the stored parts that a recorder remembers.
	maxKnownParts = 8192
)

type digest = [sha256.Size]byte

// Recorder records prompts. The zero value is ready for use. It is safe for concurrent use.
type Recorder struct {
	mu    sync.Mutex
	day   int64             // day on which the parts in known were stored, in days since 1970
	known map[digest]digest // digests of stored parts, by the digest before redaction
}

// Record is the prompt of one model call.
type Record struct {
	recorder *Recorder
	day      int64
	tools    []byte
	messages [][]byte
	options  json.RawMessage
	newParts map[digest]digest // parts to store, as in Recorder.known

	// The parts to store, one index each.
	digests   [][]byte
	bodies    []string
	truncated []bool

	// The result of the statement of Add.
	missing int     // parts that were sent as a digest only, and that retention has deleted
	problem *string // why nothing was recorded; nil if it was
}

// options are the settings of a request.
type options struct {
	Effort      string          `json:"effort,omitempty"`
	Temperature *float32        `json:"temperature,omitempty"`
	MaxTokens   int             `json:"max_tokens,omitempty"`
	Schema      string          `json:"schema,omitempty"` // name of the schema of the answer
	Format      json.RawMessage `json:"response_format,omitempty"`
}

// maxFormat bounds the schema of an answer, in bytes. It leaves room for the other options.
const maxFormat = redact.DefaultLimit - 1024

func optionsOf(req models.Request) json.RawMessage {
	o := options{Effort: req.Effort, Temperature: req.Temperature, MaxTokens: req.MaxTokens}
	if req.Schema != nil {
		o.Schema, o.Format = req.Schema.Name, redact.JSON(req.Schema, maxFormat)
	}
	return redact.JSON(o, redact.DefaultLimit)
}

// Prepare redacts and hashes a request of [models.Client.Prepared].
func (r *Recorder) Prepare(req models.Request) *Record {
	p := &Record{
		recorder: r, day: time.Now().Unix() / (24 * 60 * 60), newParts: map[digest]digest{}, options: optionsOf(req),
	}
	if len(req.Tools) > 0 {
		p.tools = p.addPart(req.Tools)
	}
	p.messages = p.addMessages(req.Messages)
	return p
}

// addMessages returns the digests of messages.
func (p *Record) addMessages(messages []models.Message) (list [][]byte) {
	for _, m := range messages {
		list = append(list, p.addPart(withoutImages(m)))
	}
	return list
}

// addPart redacts a part and returns the digest of the result. It adds the part to those to store, unless the recorder
// or this record has stored it.
func (p *Record) addPart(v any) []byte {
	raw, err := json.Marshal(v)
	if err != nil { // a tool's parameters are invalid JSON; redact describes them
		raw = redact.JSON(v, MaxPart)
	}
	rawDigest := sha256.Sum256(raw)
	if redactedDigest, ok := p.recorder.storedDigest(rawDigest, p.day); ok {
		return redactedDigest[:]
	}
	if redactedDigest, ok := p.newParts[rawDigest]; ok {
		return redactedDigest[:]
	}
	body := redact.JSON(json.RawMessage(raw), maxRedacted)
	truncated := len(body) > MaxPart
	if truncated {
		body = redact.JSON(body, MaxPart)
	}
	redactedDigest := sha256.Sum256(body)
	p.newParts[rawDigest] = redactedDigest
	p.digests, p.bodies = append(p.digests, redactedDigest[:]), append(p.bodies, string(body))
	p.truncated = append(p.truncated, truncated)
	return redactedDigest[:]
}

// storedDigest returns the digest of a part that was stored on a day.
func (r *Recorder) storedDigest(rawDigest digest, day int64) (digest, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.day != day || len(r.known) > maxKnownParts {
		r.day, r.known = day, nil
	}
	redactedDigest, ok := r.known[rawDigest]
	return redactedDigest, ok
}

// Add queues the statement that records the prompt. The batch opens the call's activity before.
func (p *Record) Add(b *pgx.Batch, executionID string, claim int64, step string) {
	p.missing, p.problem = 0, nil
	b.Queue(`
		select missing, problem from lanekeeper.record_agent_prompt(
		  (select open.activity_id from agent_activity_open open
		    where open.execution_id = @execution_id::uuid and open.claim = @claim and open.step = @step),
		  @tools, @messages, @options, @digests, @bodies, @truncated)`,
		postgres.Strict{
			"execution_id": executionID, "claim": claim, "step": step, "tools": p.tools, "messages": p.messages,
			"options": p.options, "digests": p.digests, "bodies": p.bodies, "truncated": p.truncated,
		}).QueryRow(func(row pgx.Row) error { return row.Scan(&p.missing, &p.problem) })
}

// Amend queues the statement that records the request as sent, in the transaction that ends the call's activity. It
// logs a failure, and the prompt stays as recorded before the call.
func (p *Record) Amend(ctx context.Context, log *slog.Logger, b *pgx.Batch, activityID string, sent models.Request) {
	amended := &Record{recorder: p.recorder, day: p.day, newParts: maps.Clone(p.newParts)}
	if amended.messages = amended.addMessages(sent.Messages); slices.EqualFunc(amended.messages, p.messages, bytes.Equal) {
		amended.messages = nil
	}
	options := optionsOf(sent)
	if amended.messages == nil && bytes.Equal(options, p.options) {
		return
	}
	b.Queue(`
		select problem from lanekeeper.record_agent_prompt(@activity_id, null, @messages, @options, @digests, @bodies,
		  @truncated, true)`,
		postgres.Strict{
			"activity_id": activityID, "messages": amended.messages, "options": options,
			"digests": amended.digests, "bodies": amended.bodies, "truncated": amended.truncated,
		}).QueryRow(func(row pgx.Row) error {
		var problem *string
		err := row.Scan(&problem)
		if problem != nil {
			log.WarnContext(ctx, "prompt not amended", "error", *problem)
		}
		return err
	})
}

// Committed must follow a committed batch. It remembers the stored parts, or logs the failure.
func (p *Record) Committed(ctx context.Context, log *slog.Logger) {
	if p.problem != nil {
		log.WarnContext(ctx, "prompt not recorded", "error", *p.problem)
		return
	}
	r := p.recorder
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case p.missing > 0: // retention deleted stored parts, so the next prompts must send all parts again
		r.known = nil
		log.WarnContext(ctx, "parts of a prompt not recorded", "missing", p.missing)
	case r.day == p.day:
		if r.known == nil {
			r.known = map[digest]digest{}
		}
		maps.Copy(r.known, p.newParts)
	}
}

// withoutImages replaces embedded images by their type, size and digest.
func withoutImages(m models.Message) models.Message {
	parts := slices.Clone(m.Parts)
	m = m.Shown()
	for i, p := range parts {
		if p.Image != nil && strings.HasPrefix(p.Image.URL, "data:") {
			kind, text, _ := strings.Cut(p.Image.URL, ",")
			data, err := base64.StdEncoding.DecodeString(text)
			if err != nil { // a server may accept invalid Base64
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
