// Package trace identifies a piece of autonomous work, so anyone can follow the work.
//
// Work gets a trace id where it starts. The calls, rows and log lines of the work carry the id; a child execution keeps
// the id of its root. An id is a surface prefix and a ULID in upper case:
//
//	hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE
//	│  └ 48 bits of milliseconds, 80 bits from crypto/rand
//	└ hb heartbeat, op operate, ch chat, wh webhook, fl a flow started by API or CLI, ev a trial of an eval
//
// An id is unique without coordination and shows its surface. The ids of one surface sort by creation time, to the
// millisecond. It cannot be guessed from its neighbours, because ids appear in URLs: the random part is never a
// counter.
//
// The ULID's 16 bytes are the W3C trace id: [ID.OTel] is the form of Jaeger or Tempo, and [ParseAny] reads it. The
// time in an id is from the clock of its process. Use it for sorting and reading only.
//
// The trace travels in context.Context as a [Span]. Everything here is safe for concurrent use.
package trace

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/oklog/ulid/v2"
)

// ErrInvalid is wrapped by every error of [Parse] and [ParseAny].
var ErrInvalid = errors.New("not a trace id")

// Length is the number of bytes of every valid [ID].
const Length = 2 + 1 + ulid.EncodedSize

// example is the id in error messages.
const example = "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE"

// ID is a trace id in canonical form. [Parse] and [ParseAny] read external ids. The methods of an invalid value return
// zero values, except String.
type ID string

// New makes an id for work that starts at a surface. The random part comes from crypto/rand. New panics for an
// unknown surface, which is a bug of the caller: pass external names to [ParseSurface] first.
func New(s Surface) ID {
	prefix := s.Prefix()
	if prefix == "" {
		panic(fmt.Sprintf("trace: new id: surface %q is not one of %s", string(s), strings.Join(Surfaces(), ", ")))
	}
	return ID(prefix + "_" + ulid.MustNew(ulid.Now(), rand.Reader).String())
}

// Parse reads a prefixed id, ignoring letter case. The result is canonical. The error wraps [ErrInvalid].
func Parse(s string) (ID, error) {
	if len(s) > 2*Length {
		return "", invalid(s, "it is too long (%d bytes)", len(s))
	}
	prefix, rest, found := strings.Cut(s, "_")
	if !found {
		return "", invalid(s, "it has no surface prefix")
	}
	surface, known := byPrefix(strings.ToLower(prefix))
	if !known {
		return "", invalid(s, "its prefix %q is not one of %s", prefix, strings.Join(list(Surface.Prefix), ", "))
	}
	u, err := parseULID(s, rest)
	if err != nil {
		return "", err
	}
	return surface.id(u), nil
}

// ParseAny reads an id in any form and returns the ids that it may stand for: one for the prefixed form; one for each
// surface for a ULID alone, and for the 32 hex digits of tracing tools, because neither has a surface. An id of the
// form hb_m3k9f2_a7x2p1, which imported rows have, stands for itself. At most one of the ids exists, so a query is
//
//	where trace_id = any(@ids)
//
// The error wraps [ErrInvalid] and names the problem.
func ParseAny(s string) ([]ID, error) {
	if importedForm.MatchString(s) {
		return []ID{ID(s)}, nil
	}
	switch len(s) {
	case 2 * len(ulid.ULID{}):
		var u ulid.ULID
		if _, err := hex.Decode(u[:], []byte(s)); err != nil {
			return nil, invalid(s, "it has the 32 characters of an OpenTelemetry trace id, but not all are hex digits")
		}
		if u.IsZero() {
			return nil, invalid(s, "all of it is zero")
		}
		return candidates(u), nil
	case ulid.EncodedSize:
		u, err := parseULID(s, s)
		if err != nil {
			return nil, err
		}
		return candidates(u), nil
	}
	id, err := Parse(s)
	if err != nil {
		return nil, err
	}
	return []ID{id}, nil
}

// importedForm is the form of the ids of Flowpilot, whose rows docs/guide/moving-from-flowpilot.md imports. New ids do
// not have it.
var importedForm = regexp.MustCompile(`^(hb|op|ch|wh)_[a-z0-9]{1,32}_[a-z0-9]{1,32}$`)

// Surface returns where the work began; empty for an invalid id.
func (id ID) Surface() Surface {
	surface, _, _ := id.split()
	return surface
}

// ULID returns the id without its surface; zero for an invalid id. Store [ID.Suffix], not this, in a text column.
func (id ID) ULID() ulid.ULID {
	_, u, _ := id.split()
	return u
}

// Suffix returns the ULID as 26 upper-case characters; empty for an invalid id.
func (id ID) Suffix() string {
	_, u, ok := id.split()
	if !ok {
		return ""
	}
	return u.String()
}

// OTel returns the ULID as 32 lower-case hex digits, the trace id of W3C Trace Context and OpenTelemetry; empty for an
// invalid id.
func (id ID) OTel() string {
	_, u, ok := id.split()
	if !ok {
		return ""
	}
	return hex.EncodeToString(u[:])
}

// Time returns when the id was made, in UTC to the millisecond, by the clock of its process; the zero time for an
// invalid id.
func (id ID) Time() time.Time {
	_, u, ok := id.split()
	if !ok {
		return time.Time{}
	}
	return u.Timestamp().UTC()
}

// Valid reports whether id is a trace id in canonical form.
func (id ID) Valid() bool {
	_, _, ok := id.split()
	return ok
}

// String is the id itself.
func (id ID) String() string { return string(id) }

// split takes a canonical id apart.
func (id ID) split() (Surface, ulid.ULID, bool) {
	if len(id) != Length || id[2] != '_' {
		return "", ulid.ULID{}, false
	}
	surface, known := byPrefix(string(id[:2]))
	u, err := ulid.ParseStrict(string(id[3:]))
	if !known || err != nil || u.IsZero() || u.String() != string(id[3:]) {
		return "", ulid.ULID{}, false
	}
	return surface, u, true
}

// candidates lists the ids that a ULID without a surface can mean.
func candidates(u ulid.ULID) []ID {
	ids := make([]ID, 0, len(surfaces))
	for _, s := range surfaces {
		ids = append(ids, s.id(u))
	}
	return ids
}

// parseULID reads the ULID part of whole, in any letter case.
func parseULID(whole, part string) (ulid.ULID, error) {
	u, err := ulid.ParseStrict(part)
	switch {
	case errors.Is(err, ulid.ErrDataSize):
		return u, invalid(whole, "a ULID has %d characters, this has %d", ulid.EncodedSize, len(part))
	case errors.Is(err, ulid.ErrInvalidCharacters):
		return u, invalid(whole, "a ULID has digits and letters without I, L, O and U")
	case errors.Is(err, ulid.ErrOverflow):
		return u, invalid(whole, "the first character of a ULID is at most 7")
	case err != nil:
		return u, invalid(whole, "%v", err)
	case u.IsZero():
		return u, invalid(whole, "all of it is zero")
	}
	return u, nil
}

// invalid describes the problem of s, and quotes the beginning of s.
func invalid(s, format string, args ...any) error {
	const quoted = 60
	if len(s) > quoted {
		s = s[:quoted] + "…"
	}
	return fmt.Errorf("parse trace id %q: %w: %s; a trace id looks like %s",
		s, ErrInvalid, fmt.Sprintf(format, args...), example)
}

// Surface is an entry point: the start of a trace.
type Surface string

// The surfaces. Their names are stored, so they do not change.
const (
	Heartbeat Surface = "heartbeat" // the agent's own clock
	Operate   Surface = "operate"   // an admin's session
	Chat      Surface = "chat"      // a visitor's turn
	Webhook   Surface = "webhook"   // a verified delivery
	Flow      Surface = "flow"      // a flow started by API or CLI
	Eval      Surface = "eval"      // a trial of an eval, isolated from everything else
)

// surfaces lists them in the order of messages and queries.
var surfaces = [...]Surface{Heartbeat, Operate, Chat, Webhook, Flow, Eval}

// Prefix is the prefix of the surface's ids, without the underscore; empty for an unknown surface.
func (s Surface) Prefix() string {
	switch s {
	case Heartbeat:
		return "hb"
	case Operate:
		return "op"
	case Chat:
		return "ch"
	case Webhook:
		return "wh"
	case Flow:
		return "fl"
	case Eval:
		return "ev"
	}
	return ""
}

// String is the surface's name.
func (s Surface) String() string { return string(s) }

// ParseSurface reads a surface's name or its prefix, exactly as written.
func ParseSurface(name string) (Surface, error) {
	for _, s := range surfaces {
		if name == string(s) || name == s.Prefix() {
			return s, nil
		}
	}
	return "", fmt.Errorf("parse surface %q: not one of %s", name, strings.Join(Surfaces(), ", "))
}

func (s Surface) id(u ulid.ULID) ID { return ID(s.Prefix() + "_" + u.String()) }

func byPrefix(prefix string) (Surface, bool) {
	for _, s := range surfaces {
		if s.Prefix() == prefix {
			return s, true
		}
	}
	return "", false
}

// Surfaces returns the names of all surfaces.
func Surfaces() []string { return list(Surface.String) }

// list returns a property of all surfaces.
func list(property func(Surface) string) []string {
	all := make([]string, len(surfaces))
	for i, s := range surfaces {
		all[i] = property(s)
	}
	return all
}
