package offline

import (
	_ "embed"
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

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
