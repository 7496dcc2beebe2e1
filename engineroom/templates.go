package engineroom

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"io/fs"
	"math"
	"mime"
	"net/http"
	"net/url"
	"path"
	"reflect"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/aymanbagabas/go-udiff"

	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/webassets"
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
		"odd": func(n int) bool { return n%2 == 1 }, "millis": millis, "seconds": seconds,
		"at": at, "ago": ago,
		"since": since, "until": until,
		"asset": assetURL, "build": build, "tone": tone, "shape": shape, "words": words, "class": class,
		"short": short, "tail": tail, "dict": dict, "segment": url.PathEscape, "bytes": human.Bytes,
		"left": left, "next": nextRun, "retryGroup": retryGroup,
		"passes": passesOf, "casePath": casePath,
	}
}

// millis formats a number of milliseconds of any type.
func millis(ms any) string { return human.Seconds(number(ms) / 1000) }

// seconds formats a number of seconds of any type.
func seconds(s any) string { return human.Seconds(number(s)) }

// number converts a number of any type. It returns NaN for any other value.
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

// at is a moment: 19:04:05, or 26 Nov 19:04:05 on another day.
func at(t time.Time) template.HTML { return clock("at", t) }

// ago is the age of a moment within a sentence: 3 min ago.
func ago(t time.Time) template.HTML { return clock("ago", t) }

// since is how long something has lasted: 3 min 20 s. Write "for {{since .At}}".
func since(t time.Time) template.HTML { return clock("since", t) }

// until is the distance to a moment to come: in 2 min 5 s, or due.
func until(t time.Time) template.HTML { return clock("until", t) }

// left is the rest of a time limit: 2 min 5 s left, or over.
func left(t time.Time) template.HTML { return clock("left", t) }

// nextRun is a planned moment; a past moment is due.
func nextRun(t time.Time) template.HTML {
	if t.After(time.Now()) {
		return clock("next", t)
	}
	// digits only
	return template.HTML(`<time class="next" datetime="` + t.UTC().Format(time.RFC3339Nano) + `">due</time>`)
}

// clock writes the absolute time. The script formats the time by its class.
func clock(class string, t time.Time) template.HTML {
	t = t.UTC()
	return template.HTML(fmt.Sprintf(`<time class="%s" datetime="%s">%s UTC</time>`, // digits only
		class, t.Format(time.RFC3339Nano), t.Format("2006-01-02 15:04:05")))
}

// capital returns a text with its first letter in upper case.
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

//go:embed assets
var assetFiles embed.FS

// fingerprints has the digests of the embedded files by name, and under "" a digest of all files and templates.
var fingerprints = computeFingerprints()

func computeFingerprints() map[string]string {
	all, whole := map[string]string{}, sha256.New()
	for _, files := range []embed.FS{assetFiles, templateFiles, webassets.Files} {
		err := fs.WalkDir(files, ".", func(name string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			text, err := files.ReadFile(name)
			if err != nil {
				return err
			}
			all[path.Base(name)] = shortDigest(text)
			whole.Write(text)
			return nil
		})
		if err != nil {
			return map[string]string{} // embedded files are readable; without digests, browsers only do not cache them
		}
	}
	all[""] = base64.RawURLEncoding.EncodeToString(whole.Sum(nil)[:6])
	return all
}

// shortDigest is a digest of eight characters.
func shortDigest(text []byte) string {
	sum := sha256.Sum256(text)
	return base64.RawURLEncoding.EncodeToString(sum[:6])
}

// build identifies the templates and files of this process.
func build() string { return fingerprints[""] }

// assetURL returns the versioned URL of an embedded file.
func assetURL(name string) (string, error) {
	if _, ok := fingerprints[name]; !ok {
		return "", fmt.Errorf("there is no file assets/%s", name)
	}
	return "/assets/" + name + "?v=" + fingerprints[name], nil
}

// asset serves an embedded file. Under its digest it is immutable.
func (room *Room) asset(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("file")
	text, err := assetFiles.ReadFile("assets/" + name)
	if err != nil {
		text, err = webassets.Files.ReadFile(name)
	}
	if err != nil {
		http.NotFound(w, r)
		return
	}
	h, tag := w.Header(), `"`+fingerprints[name]+`"`
	setSecurityHeaders(h)
	h.Set("ETag", tag)
	h.Set("Cache-Control", "public, no-cache")
	if r.URL.Query().Get("v") == fingerprints[name] || path.Ext(name) == ".woff2" { // a font's name has its version
		h.Set("Cache-Control", "public, max-age=31536000, immutable")
	}
	if r.Header.Get("If-None-Match") == tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	h.Set("Content-Type", cmp.Or(mime.TypeByExtension(path.Ext(name)), "font/woff2"))
	if _, err := w.Write(text); err != nil {
		room.Logger.DebugContext(r.Context(), "file not sent", "error", err)
	}
}

// escapeInvisible makes control characters and direction marks visible. The templates have none.
func escapeInvisible(text []byte) []byte {
	if isPlainText(text) {
		return text
	}
	var b bytes.Buffer
	for len(text) > 0 {
		r, size := utf8.DecodeRune(text)
		if isInvisible(r) {
			fmt.Fprintf(&b, "⟨U+%04X⟩", r)
		} else {
			b.Write(text[:size])
		}
		text = text[size:]
	}
	return b.Bytes()
}

// plainASCII has the bytes of ASCII that a browser displays as themselves.
var plainASCII = func() (is [256]bool) {
	for c := range rune(utf8.RuneSelf) {
		is[c] = !isInvisible(c)
	}
	return is
}()

// isPlainText reports a text without characters to make visible. A page may have a megabyte, most of it ASCII.
func isPlainText(text []byte) bool {
	for i := 0; i < len(text); {
		if plainASCII[text[i]] {
			i++
			continue
		}
		r, size := utf8.DecodeRune(text[i:])
		if isInvisible(r) {
			return false
		}
		i += size
	}
	return true
}

// isInvisible reports a character that a browser does not display as itself.
func isInvisible(r rune) bool {
	switch r {
	case '\n', '\t', utf8.RuneError:
		return false
	}
	return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || r == '\u200b' || r == '\ufeff' || r == '\u2060'
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

// stateStyle is the display of a state: a class for its colour, and a shape.
type stateStyle struct{ tone, shape string }

// stateStyles has the states with a display of their own. Other states are grey, with a dot.
var stateStyles = map[string]stateStyle{
	"success": {"tone-good", "✓"}, "completed": {"tone-good", "✓"}, "approved": {"tone-good", "✓"},
	"enabled": {"tone-good", "✓"},
	"active":  {"tone-good", "✓"}, "delivered": {"tone-good", "✓"}, "healthy": {"tone-good", "✓"},
	"consumed": {"tone-good", "✓"},
	"ok":       {"tone-good", "✓"}, "handled": {"tone-good", "✓"}, "answered": {"tone-good", "✓"},
	"done":    {"tone-good", "✓"},
	"running": {"tone-info", "▶"}, "claimed": {"tone-info", "▶"}, "processing": {"tone-info", "▶"},
	"on trial": {"tone-info", "◐"}, "trial": {"tone-info", "◐"},
	"pending": {"tone-warn", "○"}, "waiting": {"tone-warn", "◷"}, "pending_approval": {"tone-warn", "◷"},
	"proposed": {"tone-warn", "?"},
	"paused":   {"tone-warn", "❚❚"}, "queued": {"tone-warn", "○"}, "open": {"tone-warn", "○"},
	"parked": {"tone-warn", "❚❚"}, "unknown": {"tone-warn", "?"},
	"error": {"tone-bad", "✕"}, "failed": {"tone-bad", "✕"}, "timeout": {"tone-bad", "◷"}, "rejected": {"tone-bad", "✕"},
	"dead":     {"tone-bad", "✕"},
	"disabled": {"tone-bad", "⊘"}, "quarantined": {"tone-bad", "⊘"}, "stuck": {"tone-bad", "!"},
	"failing": {"tone-bad", "✕"}, "recovered": {"tone-good", "✓"},
	"working": {"tone-good", "●"}, "degraded": {"tone-warn", "▲"}, "stopped": {"tone-bad", "■"},
	"worker lost": {"tone-warn", "◌"},
	"passed":      {"tone-good", "✓"}, "pass": {"tone-good", "✓"}, "better": {"tone-good", "▲"},
	"good": {"tone-good", "✓"},
	"fail": {"tone-bad", "✕"}, "worse": {"tone-bad", "▼"}, "bad": {"tone-bad", "✕"}, "diverged": {"tone-bad", "≠"},
	"undecided": {"tone-warn", "?"}, "refused": {"tone-warn", "⊘"}, "denied": {"tone-warn", "⊘"}, "not worse": {"", "="},
	"cancelled": {"", "⊘"}, "skipped": {"", "–"}, "expired": {"", "◷"}, "ignored": {"", "–"}, "duplicate": {"", "–"},
	"interrupted": {"tone-warn", "◌"}, "no turns": {"", "–"}, "no trials": {"", "–"},
}

// tone returns the class of a state's colour; empty for none.
func tone(state any) string { return stateStyles[stateText(state)].tone }

// shape returns the sign before the word of a state.
func shape(state any) string {
	if l, ok := stateStyles[stateText(state)]; ok {
		return l.shape
	}
	return "·"
}

// words formats a state: pending_approval becomes pending approval.
func words(state any) string { return strings.ReplaceAll(stateText(state), "_", " ") }

// class returns a state as a part of a class name.
func class(state any) string {
	return strings.Map(func(r rune) rune {
		if (r >= 'a' && r <= 'z') || (r >= '0' && r <= '9') {
			return r
		}
		return '-'
	}, stateText(state))
}

// stateText returns a state of any type as text; empty for a nil pointer.
func stateText(state any) string {
	v := reflect.ValueOf(state)
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return ""
		}
		state = v.Elem().Interface()
	}
	return fmt.Sprint(state)
}

const (
	// maxValue bounds the characters read of a value. It exceeds the shown part, so redaction covers a whole secret at the
	// cut. The statements repeat the number.
	maxValue = 8192
	// maxShownText bounds the shown characters of a value.
	maxShownText = 4000
)

// shownValue is a redacted and cut value.
type shownValue struct {
	Text  string
	Bytes int64 // size of the whole value
	Whole bool  // Text is the whole value
}

// shownJSON formats the first maxValue characters of JSON of a given size.
func shownJSON(text string, size int64) shownValue {
	if text == "" {
		return shownValue{Whole: true}
	}
	if int64(len(text)) < size || len(text) > maxShownText || !json.Valid([]byte(text)) {
		return shownText(text, size)
	}
	return shownValue{Text: formatJSON(string(redact.JSON(json.RawMessage(text), maxValue))), Bytes: size, Whole: true}
}

// shownText formats the first maxValue characters of a text of a given size.
func shownText(text string, size int64) shownValue {
	clean := redact.Text(text, 4*maxValue)
	whole := int64(len(text)) == size && utf8.RuneCountInString(clean) <= maxShownText
	return shownValue{Text: clip(clean, size, maxShownText), Bytes: size, Whole: whole}
}

// clip returns at most n characters of a text, with its original size if it was cut.
func clip(text string, size int64, n int) string {
	count := 0
	for i := range text {
		if count == n {
			return fmt.Sprintf("%s… (%s in all)", text[:i], human.Bytes(size))
		}
		count++
	}
	if int64(len(text)) < size && count >= n {
		return fmt.Sprintf("%s… (%s in all)", text, human.Bytes(size))
	}
	return text
}

// maxJSONDepth bounds the nesting of formatted JSON.
const maxJSONDepth = 60

// maxDiffLines bounds the compared lines.
const maxDiffLines = 20_000

// formatJSON formats JSON with sorted keys, which is the hashed order, and unchanged numbers. Deeply nested or invalid
// JSON stays unchanged.
func formatJSON(text string) string {
	if jsonDepth(text) > maxJSONDepth {
		return text
	}
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()
	var value any
	if err := decoder.Decode(&value); err != nil || decoder.More() {
		return text
	}
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(value); err != nil {
		return text
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// jsonDepth returns the nesting of JSON.
func jsonDepth(text string) int {
	current, deepest, inText := 0, 0, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case inText && c == '\\':
			i++
		case c == '"':
			inText = !inText
		case inText:
		case c == '{' || c == '[':
			current++
			deepest = max(deepest, current)
		case c == '}' || c == ']':
			current--
		}
	}
	return deepest
}

// diffLine is a line of a comparison. Sign is + for a new line, − for a removed line, a space for a kept line, and …
// for omitted kept lines.
type diffLine struct{ Sign, Text string }

// Gone reports a removed line.
func (l diffLine) Gone() bool { return l.Sign == "−" }

// New reports a new line.
func (l diffLine) New() bool { return l.Sign == "+" }

// compare returns the differences of two texts; nil for equal texts. ok is false for too many lines.
func compare(before, after string) ([]diffLine, bool) {
	if strings.Count(before, "\n")+strings.Count(after, "\n") > maxDiffLines {
		return nil, false
	}
	before, after = before+"\n", after+"\n"
	hunks, err := udiff.ToUnifiedDiff("", "", before, udiff.Lines(before, after), 3)
	if err != nil {
		return nil, false
	}
	signs := map[udiff.OpKind]string{udiff.Delete: "−", udiff.Insert: "+", udiff.Equal: " "}
	var lines []diffLine
	for i, h := range hunks.Hunks {
		if i > 0 || h.FromLine > 1 {
			lines = append(lines, diffLine{"…", ""})
		}
		for _, l := range h.Lines {
			lines = append(lines, diffLine{signs[l.Kind], strings.TrimSuffix(l.Content, "\n")})
		}
	}
	return lines, true
}
