package trace

import (
	"fmt"
	"strings"

	"github.com/oklog/ulid/v2"
)

// Surface is a way in: where a piece of work began.
type Surface string

// The surfaces. Their names are stored, so they do not change.
const (
	Heartbeat Surface = "heartbeat" // the agent's own clock
	Operate   Surface = "operate"   // an admin's session
	Chat      Surface = "chat"      // a visitor's turn
	Webhook   Surface = "webhook"   // a verified delivery
	Flow      Surface = "flow"      // a flow started by API or CLI
)

// surfaces lists them in the order that messages and look-ups use. It is never written to.
var surfaces = [...]Surface{Heartbeat, Operate, Chat, Webhook, Flow}

// Prefix is what the ids of this surface begin with, without the underscore; empty for a
// surface that does not exist.
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
	return "", fmt.Errorf("parse surface %q: not one of %s", name, surfaceNames())
}

// id puts the surface before a ULID.
func (s Surface) id(u ulid.ULID) ID { return ID(s.Prefix() + "_" + u.String()) }

// byPrefix finds the surface whose ids begin with prefix.
func byPrefix(prefix string) (Surface, bool) {
	for _, s := range surfaces {
		if s.Prefix() == prefix {
			return s, true
		}
	}
	return "", false
}

// surfaceNames lists the names for a message.
func surfaceNames() string {
	names := make([]string, 0, len(surfaces))
	for _, s := range surfaces {
		names = append(names, string(s))
	}
	return strings.Join(names, ", ")
}

// prefixNames lists the prefixes for a message.
func prefixNames() string {
	names := make([]string, 0, len(surfaces))
	for _, s := range surfaces {
		names = append(names, s.Prefix())
	}
	return strings.Join(names, ", ")
}
