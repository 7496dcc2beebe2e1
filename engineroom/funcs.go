package engineroom

import (
	"embed"
	"fmt"
	"html/template"
	"net/url"
	"strconv"
	"strings"
	"time"
)

//go:embed templates
var templateFiles embed.FS

func parseTemplates() (*template.Template, error) {
	return template.New("").Option("missingkey=zero").Funcs(funcs()).ParseFS(templateFiles, "templates/*.html")
}

// funcs are what templates format with.
func funcs() template.FuncMap {
	return template.FuncMap{
		"cut": cut, "brief": brief, "thousands": thousands, "money": money, "millis": millis, "at": at, "since": since, "until": until,
		"asset": assetURL, "build": build, "tone": tone, "shape": shape, "words": words, "class": class,
		"short": short, "dict": dict, "segment": url.PathEscape, "bytes": size,
	}
}

// thousands writes a count with separators: 12,345.
func thousands(n int64) string {
	digits, sign := strings.CutPrefix(strconv.FormatInt(n, 10), "-") // -n is no number for the least of all
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	if sign {
		return "-" + digits
	}
	return digits
}

// money writes dollars: two decimals from a dollar on, four below a cent's worth of detail.
func money(usd float64) string {
	if usd == 0 || usd >= 1 {
		return fmt.Sprintf("$%.2f", usd)
	}
	return fmt.Sprintf("$%.4f", usd)
}

// millis writes a duration in milliseconds: 850 ms, 1.2 s, 3 min 20 s.
func millis(ms int64) string {
	d := time.Duration(ms) * time.Millisecond
	switch {
	case d < time.Second:
		return fmt.Sprintf("%d ms", ms)
	case d < time.Minute:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < time.Hour:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	}
	return fmt.Sprintf("%d h %d min", int(d.Hours()), int(d.Minutes())%60)
}

// size writes bytes: 512 B, 1.5 kB, 3.2 MB.
func size(n int64) string {
	switch {
	case n < 1000:
		return fmt.Sprintf("%d B", n)
	case n < 1000*1000:
		return fmt.Sprintf("%.1f kB", float64(n)/1000)
	case n < 1000*1000*1000:
		return fmt.Sprintf("%.1f MB", float64(n)/1000/1000)
	}
	return fmt.Sprintf("%.1f GB", float64(n)/1000/1000/1000)
}

// at is a moment; the page's script shows it in the reader's time zone.
func at(t time.Time) template.HTML { return clock("at", t) }

// since is how long ago a moment was; the page's script keeps it counting.
func since(t time.Time) template.HTML { return clock("since", t) }

// until is how long it is to a moment; the page's script counts it down.
func until(t time.Time) template.HTML { return clock("until", t) }

// clock writes the moment itself, which stays true however long the page is open. The script turns it into what
// its class asks for.
func clock(class string, t time.Time) template.HTML {
	t = t.UTC()
	return template.HTML(fmt.Sprintf(`<time class="%s" datetime="%s">%s UTC</time>`, // digits only
		class, t.Format(time.RFC3339Nano), t.Format("2006-01-02 15:04:05")))
}

// short is the end of an id, enough to tell it from its neighbours.
func short(id string) string {
	if i := strings.LastIndexByte(id, '-'); i > 0 && len(id) == 36 {
		return id[i+1:]
	}
	return id
}

// dict makes arguments for a template: {{template "x" (dict "Name" .Name)}}.
func dict(pairs ...any) (map[string]any, error) {
	if len(pairs)%2 != 0 {
		return nil, fmt.Errorf("dict wants pairs, got %d values", len(pairs))
	}
	m := make(map[string]any, len(pairs)/2)
	for i := 0; i < len(pairs); i += 2 {
		key, is := pairs[i].(string)
		if !is {
			return nil, fmt.Errorf("dict wants a text as key, got %T", pairs[i])
		}
		m[key] = pairs[i+1]
	}
	return m, nil
}
