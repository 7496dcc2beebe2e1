package offline

import (
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

const maxValues = 1000 // in one call's arguments

// filler makes values for a JSON Schema. It does not follow references.
type filler struct {
	turn
	text     string // for parameters that accept any text
	invented bool   // a value came from neither the schema, the message nor a result
	values   int
}

// fill makes a call of a tool. known is false if a required argument had to be invented.
func (t turn) fill(tl tool, given map[string]any) (c call, known bool) {
	f := filler{turn: t, text: truncate(oneLine(t.prompt), 200)}
	return call{name: tl.name, arguments: encode(f.object(tl.schema, given))}, !f.invented
}

// object fills the required properties and those given.
func (f *filler) object(schema, given map[string]any) map[string]any {
	out := map[string]any{}
	properties, _ := schema["properties"].(map[string]any)
	for name, value := range given {
		if _, declared := properties[name]; declared && value != "" {
			out[name] = value
		}
	}
	for _, name := range required(schema) {
		if _, has := out[name]; !has {
			property, _ := properties[name].(map[string]any)
			out[name] = f.value(name, property)
		}
	}
	return out
}

func required(schema map[string]any) []string {
	list, _ := schema["required"].([]any)
	names := make([]string, 0, len(list))
	for _, name := range list {
		names = append(names, fmt.Sprint(name))
	}
	return names
}

func (f *filler) value(name string, schema map[string]any) any {
	if f.values++; f.values > maxValues {
		return nil
	}
	for _, key := range []string{"default", "const"} {
		if v, has := schema[key]; has {
			return v
		}
	}
	for _, key := range []string{"enum", "examples"} {
		if list, _ := schema[key].([]any); len(list) > 0 {
			return list[0]
		}
	}
	switch fmt.Sprint(schema["type"]) {
	case "object":
		return f.object(schema, nil)
	case "array":
		items, _ := schema["items"].(map[string]any)
		list := []any{}
		for range min(int(bound(schema, "minItems", 0)), 10) {
			list = append(list, f.value(name, items))
		}
		return list
	case "integer":
		return int64(f.number(name, schema))
	case "number":
		return f.number(name, schema)
	case "boolean":
		return false
	case "null":
		return nil
	}
	text := []rune(cmp.Or(f.find(formats[fmt.Sprint(schema["format"])]), f.string(name)))
	return string(text[:min(len(text), max(0, int(bound(schema, "maxLength", 1000))))])
}

// number returns the message's number for a parameter, or a small one, within the schema's bounds.
func (f *filler) number(name string, schema map[string]any) float64 {
	text := cmp.Or(f.find(spoken(name)+`(?:\s*[:=]\s*|\s+)(\d+(?:\.\d+)?)`), f.find(`(\d+(?:\.\d+)?)\s+`+spoken(name)),
		"1")
	n, err := strconv.ParseFloat(text, 64)
	if err != nil {
		n = 1
	}
	return min(max(n, bound(schema, "minimum", math.Inf(-1))), bound(schema, "maximum", math.Inf(1)))
}

func bound(schema map[string]any, key string, otherwise float64) float64 {
	if n, ok := schema[key].(float64); ok {
		return n
	}
	return otherwise
}

// string returns a text for a parameter. It prefers "name: value" in the message, then an earlier result with that
// name. A parameter for free text gets the whole message.
func (f *filler) string(name string) string {
	if text := f.find(spoken(name) + `\s*[:=]\s*["'` + "`" + `]?([\w.:/@-]*\w)`); text != "" {
		return text
	}
	for _, c := range f.calls {
		if m := regexp.MustCompile(`"` + name + `(?:_name)?":\s*"([^"]+)"`).FindStringSubmatch(c.result); m != nil &&
			!c.failed {
			return m[1]
		}
	}
	if listed("free_text", strings.ToLower(name)) {
		return f.text
	}
	f.invented = true
	return cmp.Or(f.find(spoken(name)+`\s+(?:is\s+)?([\w.:/@-]*\w)`), append(stems(f.prompt), "unknown")[0])
}

// formats are patterns for values of a schema's format.
var formats = map[string]string{
	"date": `(\d{4}-\d\d-\d\d)`, "email": `([\w.+-]+@[\w-]+(?:\.[\w-]+)+)`, "uri": `(https?://[^\s"'<>)]+)`,
	"uuid": `([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})`,
}

// find returns the group of a pattern in the prompt.
func (f *filler) find(pattern string) string {
	if pattern == "" {
		return ""
	}
	if m := regexp.MustCompile(`(?i)\b` + pattern).FindStringSubmatch(f.prompt); m != nil {
		return m[1]
	}
	return ""
}

// spoken returns a pattern for a parameter's name in a sentence.
func spoken(name string) string {
	return strings.ReplaceAll(regexp.QuoteMeta(name), "_", `[_ ]`)
}

func encode(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return "{}" // decoded JSON encodes without an error
	}
	return string(text)
}

//go:embed lexicon.json
var lexiconJSON []byte

// lexicon holds the word lists, the intents and the answers' texts in English and Spanish.
var lexicon = readLexicon()

type lexiconData struct {
	Words   map[string]string
	Stems   map[string]string // stems of irregular forms and synonyms
	Intents []intent
	Rows    map[string]string // how a row of a runtime skill reads
	Texts   map[string]map[string]string
}

// intent is a phrase with a fixed answer: a text, or a call of the first offered tool.
type intent struct {
	Pattern   *regexp.Regexp
	Text      string
	Tools     string
	Arguments map[string]any
	Document  bool // matches only a message about an attached document
}

func readLexicon() lexiconData {
	var l lexiconData
	if err := json.Unmarshal(lexiconJSON, &l); err != nil {
		panic("offline: lexicon.json: " + err.Error())
	}
	return l
}

func listed(list, word string) bool {
	return strings.Contains(" "+lexicon.Words[list]+" ", " "+word+" ")
}

// textsFor returns the answers' texts in the language of a message.
func textsFor(message string) map[string]string {
	spanish, english := 0, 0
	for _, word := range wordsOf(message) {
		if listed("spanish", word) {
			spanish++
		} else if listed("english", word) {
			english++
		}
	}
	if strings.ContainsAny(message, "¿¡") || spanish > english {
		return lexicon.Texts["es"]
	}
	return lexicon.Texts["en"]
}

// wordsOf returns a text's words in lower case and without accents.
func wordsOf(text string) []string {
	plain := strings.NewReplacer("á", "a", "é", "e", "í", "i", "ó", "o", "ú", "u", "ü", "u", "ñ",
		"n").Replace(strings.ToLower(text))
	return strings.FieldsFunc(plain, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
}

// keywords returns up to six words of a text without stop words.
func keywords(text string) []string {
	list := slices.DeleteFunc(wordsOf(text),
		func(word string) bool { return listed("stop_words", word) || len(word) > 30 })
	return list[:min(len(list), 6)]
}

// stems returns the distinct stems of a text without stop words, in order.
func stems(text string) []string {
	var list []string
	for _, word := range wordsOf(text) {
		if s := stem(word); len(s) > 1 && !listed("stop_words", word) && !slices.Contains(list, s) {
			list = append(list, s)
		}
	}
	return list
}

// endings are the inflections that stem removes from longer words, with their replacements.
var endings = regexp.MustCompile(`^(.{2,})(?:(ie)s|(x)es|([^s])s|(...)ing|(..)ed)$`)

func stem(word string) string {
	for _, form := range []string{word, strings.TrimSuffix(word, "s")} {
		if s := lexicon.Stems[form]; s != "" {
			return s
		}
	}
	if m := endings.FindStringSubmatch(word); m != nil {
		word = m[1] + strings.Replace(m[2], "ie", "y", 1) + m[3] + m[4] + m[5] + m[6]
	}
	if len(word) > 3 {
		word = strings.TrimSuffix(word, "e")
	}
	return word
}

func overlap(a, b []string) (n int) {
	for _, word := range b {
		if slices.Contains(a, word) {
			n++
		}
	}
	return n
}
