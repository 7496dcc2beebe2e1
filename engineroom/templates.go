package engineroom

import (
	"crypto/rand"
	"embed"
	"fmt"
	"html/template"
	"math"
	"net/url"
	"reflect"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/human"
)

//go:embed templates
var templateFiles embed.FS

func parseTemplates() (*template.Template, error) {
	return template.New("").Option("missingkey=zero").Funcs(funcs()).ParseFS(templateFiles, "templates/*.html")
}

// funcs are the functions of templates.
func funcs() template.FuncMap {
	return template.FuncMap{
		"cut": cut, "brief": brief, "thousands": human.Count, "money": human.Money, "cost": human.Cost, "capital": capital,
		"odd": func(n int) bool { return n%2 == 1 }, "millis": millis, "seconds": seconds, "plural": plural,
		"at": timeOfDay, "ago": ago, "since": since, "until": until, "left": timeLeft, "next": nextRun,
		"asset": assetURL, "build": build, "tone": tone, "shape": shape, "words": words, "class": class,
		"short": short, "tail": tail, "dict": dict, "segment": url.PathEscape, "bytes": human.Bytes,
		"retryGroup": retryGroup, "passes": passesOf, "casePath": casePath, "once": rand.Text,
	}
}

// millis formats a number of milliseconds: see number.
func millis(ms any) string { return human.Seconds(number(ms) / 1000) }

// seconds formats a number of seconds: see number.
func seconds(s any) string { return human.Seconds(number(s)) }

// plural returns a noun in the number of n, a signed integer.
func plural(noun string, n any) string { return human.Plural(int64(number(n)), noun) }

// number converts a signed integer, a float or a pointer to one. It returns NaN for any other value.
func number(n any) float64 {
	v := reflect.Indirect(reflect.ValueOf(n))
	switch {
	case v.CanInt():
		return float64(v.Int())
	case v.CanFloat():
		return v.Float()
	}
	return math.NaN()
}

// The clocks of a page. Each writes the absolute time in UTC. The page's script shows the time in the reader's zone and
// keeps it up to date. Package human defines the displayed forms.

// timeOfDay is a moment: 19:04:05, or 26 Nov 19:04:05 on another day.
func timeOfDay(t time.Time) template.HTML { return clock("at", t) }

// ago is the age of a moment within a sentence: 3 min ago.
func ago(t time.Time) template.HTML { return clock("ago", t) }

// since is how long something has lasted: 3 min 20 s. Write "for {{since .At}}".
func since(t time.Time) template.HTML { return clock("since", t) }

// until is the distance to a moment to come: in 2 min 5 s, or due.
func until(t time.Time) template.HTML { return clock("until", t) }

// timeLeft is the rest of a time limit: 2 min 5 s left, or over.
func timeLeft(t time.Time) template.HTML { return clock("left", t) }

// nextRun is a planned moment; a past moment is due.
func nextRun(t time.Time) template.HTML {
	if t.After(time.Now()) {
		return clock("next", t)
	}
	// A formatted time needs no escape.
	return template.HTML(`<time class="next" datetime="` + t.UTC().Format(time.RFC3339Nano) + `">due</time>`)
}

// clock writes the absolute time. The script formats the time by its class.
func clock(class string, t time.Time) template.HTML {
	t = t.UTC()
	return template.HTML(fmt.Sprintf(`<time class="%s" datetime="%s">%s UTC</time>`, // a formatted time needs no escape
		class, t.Format(time.RFC3339Nano), t.Format("2006-01-02 15:04:05")))
}

// capital returns a text with its first letter, which must be ASCII, in upper case.
func capital(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:]
}

// short returns the last group of a uuid, and any other id whole.
func short(id string) string {
	if i := strings.LastIndexByte(id, '-'); i > 0 && len(id) == 36 {
		return id[i+1:]
	}
	return id
}

// dict returns a map of pairs, as the argument of a template: {{template "x" (dict "Name" .Name)}}.
func dict(pairs ...any) (map[string]any, error) {
	if len(pairs)%2 != 0 {
		return nil, fmt.Errorf("dict wants pairs, got %d values", len(pairs))
	}
	m := make(map[string]any, len(pairs)/2)
	for i := 0; i < len(pairs); i += 2 {
		key, ok := pairs[i].(string)
		if !ok {
			return nil, fmt.Errorf("dict wants string keys, got %T", pairs[i])
		}
		m[key] = pairs[i+1]
	}
	return m, nil
}

// brief returns at most n characters from both ends of a text, because long names often share a prefix. A title has the
// full text.
func brief(n int, s string) string {
	if len(s) <= n {
		return s
	}
	runes := []rune(s)
	if len(runes) <= n {
		return s
	}
	tail := n / 2
	return string(runes[:n-tail-1]) + "…" + string(runes[len(runes)-tail:])
}

// cut returns at most n characters of a text, and how many are omitted.
func cut(n int, s string) string { return human.Cut(n, s) }

// tail returns the end of an id for lists: 12 hex digits of a uuid or 8 letters of a trace id. It returns other ids
// whole.
func tail(id string) string {
	if len(id) == traceIDLength && id[2] == '_' {
		return "…" + id[traceIDLength-8:]
	}
	return short(id)
}
