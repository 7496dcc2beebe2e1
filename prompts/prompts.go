// Package prompts keeps the exact prompt of each model call, for people who read its trace.
//
// A prompt is a list of parts: the definitions of the tools, and each message. A part is redacted first, as the
// activity log is, and stored once under the SHA-256 of the redacted text. A model call keeps the digests of its
// parts. So a conversation of 50 turns has each message once, and two calls show which parts they share.
//
// What it promises:
//
//   - No secret that the activity log would hide is stored. What only a provider reads (models.Opaque) is not either.
//   - Recording costs no round trip: its statement joins the batch that opens the call. Parts that this process has
//     stored on the same day are sent as digests alone.
//   - Recording fails no model call. Why it failed is logged.
//   - A part has at most [MaxPart] bytes. A larger one is cut and says so. Of a picture only size and digest are kept.
//
// Package retention deletes prompts by their own policy, and parts that no prompt has any more.
package prompts

import (
	"context"
	"crypto/sha256"
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
	Effort      string   `json:"effort,omitempty"`
	Temperature *float32 `json:"temperature,omitempty"`
	Schema      string   `json:"schema,omitempty"`
}

// Prepare redacts and hashes a request. What the client repairs before it sends a request is repaired here as well.
func (r *Recorder) Prepare(req models.Request) *Record {
	p := &Record{recorder: r, day: time.Now().Unix() / (24 * 60 * 60), fresh: map[digest]digest{}}
	if len(req.Tools) > 0 {
		p.tools = p.part(req.Tools)
	}
	for _, m := range models.Sent(req.Messages) {
		p.messages = append(p.messages, p.part(withoutPictures(m)))
	}
	about := options{Effort: req.Effort, Temperature: req.Temperature}
	if req.Schema != nil {
		about.Schema = req.Schema.Name
	}
	p.options = redact.JSON(about, redact.DefaultLimit)
	return p
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
	p.digests, p.bodies, p.truncated = append(p.digests, stored[:]), append(p.bodies, string(body)), append(p.truncated, truncated)
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
		select missing, problem from record_agent_prompt(@execution_id, @claim, @step, @tools, @messages, @options, @digests, @bodies, @truncated)`,
		postgres.Strict{
			"execution_id": executionID, "claim": claim, "step": step, "tools": p.tools, "messages": p.messages, "options": p.options,
			"digests": p.digests, "bodies": p.bodies, "truncated": p.truncated,
		}).QueryRow(func(row pgx.Row) error { return row.Scan(&p.missing, &p.problem) })
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
			kind, data, _ := strings.Cut(p.Image.URL, ",")
			p.Image = &models.Image{
				URL: fmt.Sprintf("%s,[%d bytes, SHA-256 %x]", kind, len(data), sha256.Sum256([]byte(data))), Detail: p.Image.Detail,
			}
		}
		parts[i] = p
	}
	m.Parts = parts
	return m
}
