package email

import (
	"strings"

	"github.com/emersion/go-msgauth/authres"
)

// proven reports whether the pinned server confirms that the mail comes from the domain. Only its first header counts:
// the server adds it on top, above any header of the sender.
func proven(headers []string, server, domain string) bool {
	if server == "" || domain == "" {
		return false
	}
	for _, header := range headers {
		id, results, err := authres.Parse(withoutQuotes(header))
		if !strings.EqualFold(id, server) {
			continue
		}
		return err == nil && passes(results, domain)
	}
	return false
}

func passes(results []authres.Result, domain string) (pass bool) {
	for _, result := range results {
		switch r := result.(type) {
		case *authres.DMARCResult:
			if r.Value != authres.ResultPass && r.Value != authres.ResultNone {
				return false
			}
			pass = pass || r.Value == authres.ResultPass && strings.EqualFold(r.From, domain)
		case *authres.DKIMResult:
			of := r.Domain
			if of == "" {
				_, of, _ = strings.Cut(r.Identifier, "@")
			}
			pass = pass || r.Value == authres.ResultPass && strings.EqualFold(of, domain)
		}
	}
	return pass
}

// withoutQuotes replaces each comment by a space and each quoted string by _. The sender may have written a semicolon
// in them, and the parser would end a result there. For an unclosed comment or string, it returns "".
func withoutQuotes(header string) string {
	var out strings.Builder
	depth, quoted := 0, false
	for i := 0; i < len(header); i++ {
		switch c := header[i]; {
		case c == '\\' && (quoted || depth > 0):
			i++
		case quoted:
			quoted = c != '"'
		case c == '(':
			depth++
		case c == ')' && depth > 0:
			depth--
			out.WriteByte(' ')
		case depth > 0:
		case c == '"':
			quoted = true
			out.WriteByte('_')
		default:
			out.WriteByte(c)
		}
	}
	if quoted || depth > 0 {
		return ""
	}
	return out.String()
}
