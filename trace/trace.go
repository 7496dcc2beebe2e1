// Package trace names a piece of autonomous work, so that anyone can follow it.
//
// A trace id is given once, where the work begins, and then stays with every call, row and
// log line the work causes; an execution started by another keeps the id of its root. It is
// a surface prefix and a ULID, upper case:
//
//	hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE
//	│  └ 48 bits of milliseconds, 80 bits from crypto/rand
//	└ hb heartbeat, op operate, ch chat, wh webhook, fl a flow started by API or CLI
//
// What that promises: an id is unique without asking anyone, sorts by the time it was made,
// says at a glance where the work came from, and cannot be guessed from its neighbours (the
// random part is drawn afresh each time, never counted up), because ids appear in URLs.
//
// The ULID's 16 bytes are the W3C trace id: [ID.OTel] is what Jaeger or Tempo shows, and
// [ParseAny] leads back from it. The time inside an id comes from the clock of the process
// that made it. It is good for sorting and reading; nothing is decided by it.
//
// The trace travels in context.Context as a [Span]. Everything here is safe for concurrent use.
package trace

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/oklog/ulid/v2"
)

// ErrInvalid is in the chain of every error that [Parse] and [ParseAny] return.
var ErrInvalid = errors.New("not a trace id")

// Length is the number of bytes of every valid [ID].
const Length = 2 + 1 + ulid.EncodedSize

// example is the id that error messages show.
const example = "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE"

// ID is a trace id in its one canonical form. Ids from outside become one through [Parse] or
// [ParseAny]; the methods of a value that came neither from there nor from [New] give zero values.
type ID string

// New makes an id for work that begins at a surface. The random part comes from crypto/rand.
//
// It panics when s is not one of the constants, which is a mistake in the program: a name
// from outside passes [ParseSurface] first.
func New(s Surface) ID {
	prefix := s.Prefix()
	if prefix == "" {
		panic(fmt.Sprintf("trace: new id: surface %q is not one of %s", string(s), surfaceNames()))
	}
	return ID(prefix + "_" + ulid.MustNew(ulid.Now(), rand.Reader).String())
}

// Parse reads an id in its prefixed form. Letter case does not matter; the result is canonical,
// so two spellings of one id compare equal. The error wraps [ErrInvalid] and says what is wrong.
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
		return "", invalid(s, "its prefix %q is not one of %s", prefix, prefixNames())
	}
	u, err := parseULID(s, rest)
	if err != nil {
		return "", err
	}
	return surface.id(u), nil
}

// ParseAny reads an id in any form a person may have at hand and returns the ids it can mean:
// one for the prefixed form; one for each surface for the 32 hex digits that tracing tools
// show, and for a ULID alone, because neither says which surface it was. At most one of them
// exists, so a look-up is
//
//	where trace_id = any(@ids)
//
// The error wraps [ErrInvalid] and says what is wrong.
func ParseAny(s string) ([]ID, error) {
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

// Surface is where the work began; empty when id is not valid.
func (id ID) Surface() Surface {
	surface, _, _ := id.split()
	return surface
}

// ULID is the id without its surface; zero when id is not valid. Give [ID.Suffix], not this,
// to a text column.
func (id ID) ULID() ulid.ULID {
	_, u, _ := id.split()
	return u
}

// Suffix is the ULID as 26 upper-case characters; empty when id is not valid.
func (id ID) Suffix() string {
	_, u, ok := id.split()
	if !ok {
		return ""
	}
	return u.String()
}

// OTel is the same 16 bytes as 32 lower-case hex digits, the trace id of W3C Trace Context and
// OpenTelemetry; empty when id is not valid.
func (id ID) OTel() string {
	_, u, ok := id.split()
	if !ok {
		return ""
	}
	return hex.EncodeToString(u[:])
}

// Time is when the id was made, in UTC to the millisecond, by the clock of the process that
// made it; the zero time when id is not valid.
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

// invalid describes what is wrong with s, and shows no more of s than helps.
func invalid(s, format string, args ...any) error {
	const most = 60
	shown := s
	if len(shown) > most {
		shown = shown[:most] + "…"
	}
	return fmt.Errorf("parse trace id %q: %w: %s; a trace id looks like %s",
		shown, ErrInvalid, fmt.Sprintf(format, args...), example)
}
