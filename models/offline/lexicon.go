package offline

import (
	"cmp"
	_ "embed"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"
)

//go:embed lexicon.yaml
var lexiconYAML []byte

// lexicon is the data of the rules, in English and Spanish.
var lexicon = func() (l struct {
	Words    map[string]string
	Stems    map[string]string
	Patterns map[string]*regexp.Regexp
	Values   map[string][]string
	Intents  []intent
	Rows     map[string]string
	Texts    map[string]map[string]string
},
) {
	if err := yaml.Unmarshal(lexiconYAML, &l); err != nil {
		panic("offline: lexicon.yaml: " + err.Error())
	}
	return l
}()

// intent is a phrase with a fixed answer: a text, or a call of the first offered tool.
type intent struct {
	Pattern   *regexp.Regexp
	Text      string
	Tools     string
	Arguments map[string]any
	Document  bool // matches only a message about an attached document
}

func pattern(name string) *regexp.Regexp { return lexicon.Patterns[name] }

func listed(list, word string) bool {
	return strings.Contains(" "+lexicon.Words[list]+" ", " "+word+" ")
}

// textsFor returns the answers' texts in the language of a message.
func textsFor(message string) map[string]string {
	count := func(list string) int { return overlap(strings.Fields(lexicon.Words[list]), wordsOf(message)) }
	if strings.ContainsAny(message, "¿¡") || count("spanish") > count("english") {
		return lexicon.Texts["es"]
	}
	return lexicon.Texts["en"]
}

// wordsOf returns a text's words in lower case and without accents.
func wordsOf(text string) []string {
	plain := strings.NewReplacer("á", "a", "é", "e", "í", "i", "ó", "o", "ú", "u", "ü", "u", "ñ", "n")
	return strings.FieldsFunc(plain.Replace(strings.ToLower(text)), func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r)
	})
}

// keywords returns up to six words of a text without stop words.
func keywords(text string) []string {
	list := slices.DeleteFunc(wordsOf(text), func(word string) bool {
		return listed("stop_words", word) || len(word) > 30
	})
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

func stem(word string) string {
	if s := cmp.Or(lexicon.Stems[word], lexicon.Stems[strings.TrimSuffix(word, "s")]); s != "" {
		return s
	}
	if m := pattern("inflection").FindStringSubmatch(word); m != nil {
		word = m[1] + strings.Replace(m[2], "ie", "y", 1) + strings.Join(m[3:], "")
	}
	if len(word) > 3 {
		word = strings.TrimSuffix(word, "e")
	}
	return word
}

// overlap counts the stems of two texts that are the same.
func overlap(a, b []string) (n int) {
	for _, word := range b {
		if slices.Contains(a, word) {
			n++
		}
	}
	return n
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

func hasDigit(text string) bool { return strings.ContainsAny(text, "0123456789") }
