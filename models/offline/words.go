package offline

import (
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// words are the stems of a text's words without the small ones, in order, each once.
func words(text string) []string {
	var out []string
	seen := map[string]bool{}
	fields := strings.FieldsFunc(fold(text), func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
	for _, field := range fields {
		stemmed := stem(field)
		if len(stemmed) < 2 || isSmall(field) || seen[stemmed] {
			continue
		}
		seen[stemmed] = true
		out = append(out, stemmed)
	}
	return out
}

// overlap counts the words that two lists share.
func overlap(a, b []string) int {
	in := make(map[string]bool, len(a))
	for _, w := range a {
		in[w] = true
	}
	n := 0
	for _, w := range b {
		if in[w] {
			n++
		}
	}
	return n
}

// closeness is how much a tool has to do with some words: a word in its name counts three times.
func (t tool) closeness(to []string) int {
	return 3*overlap(to, words(t.name)) + overlap(to, words(t.description))
}

// fold is a text in lower case, without the accents of Spanish.
func fold(text string) string {
	return strings.NewReplacer("á", "a", "é", "e", "í", "i", "ó", "o", "ú", "u", "ü", "u", "ñ", "n").Replace(strings.ToLower(text))
}

// stem makes the forms of an English word alike, and some words that mean alike, Spanish ones too.
func stem(word string) string {
	if english := translated(word); english != "" {
		word = english
	}
	switch word {
	case "large", "larger", "largest", "big", "bigger", "biggest", "huge", "space", "disk":
		return "siz"
	case "sessions", "session", "clients", "backends", "backend":
		return "connection"
	case "statements", "statement", "sql":
		return "query"
	case "healthy":
		return "health"
	case "grow", "grew", "grown", "growing", "changed", "change", "changes":
		return "growth"
	case "bloat", "vacuum", "autovacuum":
		return "dead"
	}
	switch {
	case len(word) > 4 && strings.HasSuffix(word, "ies"):
		return word[:len(word)-3] + "y"
	case len(word) > 4 && strings.HasSuffix(word, "xes"):
		return word[:len(word)-2]
	case len(word) > 3 && strings.HasSuffix(word, "s") && !strings.HasSuffix(word, "ss"):
		word = word[:len(word)-1]
	case len(word) > 5 && strings.HasSuffix(word, "ing"):
		word = word[:len(word)-3]
	case len(word) > 4 && strings.HasSuffix(word, "ed"):
		word = word[:len(word)-2]
	}
	if len(word) > 3 {
		word = strings.TrimSuffix(word, "e")
	}
	return word
}

// translated is the English for a Spanish word that databases and agents are talked about with; else empty.
func translated(word string) string {
	switch strings.TrimSuffix(word, "s") {
	case "tabla":
		return "tables"
	case "tamano", "grande", "espacio", "disco", "ocupa", "ocupan", "pesa", "pesan":
		return "size"
	case "dato":
		return "database"
	case "consulta":
		return "queries"
	case "lenta", "lento":
		return "slow"
	case "conexion", "conexione", "sesion", "sesione":
		return "connections"
	case "indice":
		return "indexes"
	case "salud", "sana", "sano":
		return "health"
	case "fila":
		return "rows"
	case "muerta":
		return "dead"
	case "crecido", "crecio", "crece", "crecen", "cambio", "cambiado":
		return "growth"
	case "ayer":
		return "yesterday"
	case "memoria", "recuerdo":
		return "memory"
	case "transaccion", "transaccione":
		return "transactions"
	case "actividad":
		return "activity"
	case "usado", "usada":
		return "used"
	}
	return ""
}

const small = `a about after all also an and any are as at be been before but by can could did do does each else for from had has have
 how i if in into is it its me more most my no not of off on one or our out over own please round should so step steps task
 nobody than that the their them then there these they this those to tool tools up use was we were what when where which who why
 will with would you your id objective report look show tell give get list check find number`

const smallSpanish = `al algo base como con cual cuales cuando cuanto cuantos cuanta cuantas de del dime donde el ella en era eres es esta estan
 este esto ese eso fue ha hace hacer hay he la las le lo los mas me mi mis mucho muestra muestrame nos nuestra o otra para pero por porque puede
 puedes que quien se ser si sin sobre son su sus tan te tengo tiene tienes todo todas todos tu tus un una unas uno unos y ya yo`

// isSmall reports whether a word says nothing about the subject.
func isSmall(word string) bool {
	return slices.Contains(strings.Fields(small), word) || slices.Contains(strings.Fields(smallSpanish), word)
}

const changing = `accept add advance alter apply approve archive assign ban buy cancel change clean clear close commit create deactivate delegate delete deploy
 disable drop edit enable execute fix flag forget grant import insert install invite invoke kill make merge migrate move notify patch pause pay post
 propose prune publish purge push put reboot rebuild refund register reindex reject release reload remember remove rename renew repair replace reply reset
 restart restore resume revoke rotate run save send set start stop submit subscribe suspend swap sync terminate transfer trigger truncate
 uninstall unlock update upgrade upload upsert vacuum wipe write`

const showing = `activity age count counts history info list log progress rate report size sizes state statistics stats status summary waits`

// changes reports whether a tool sounds as if it did more than look: a verb of change at the beginning or end of its
// name or at the beginning of its description. A description that says read-only is believed.
func (t tool) changes() bool {
	description := strings.ToLower(strings.TrimSpace(t.description))
	if strings.Contains(description, "read-only") || strings.Contains(description, "read only") {
		return false
	}
	first, _, _ := strings.Cut(description, " ")
	if isChanging(first) {
		return true
	}
	parts := strings.FieldsFunc(strings.ToLower(t.name), func(r rune) bool { return !unicode.IsLetter(r) })
	if len(parts) == 0 || slices.Contains(strings.Fields(showing), parts[len(parts)-1]) {
		return false
	}
	return isChanging(parts[0]) || isChanging(parts[len(parts)-1])
}

// discouraged matches the description of a tool that is there to be left alone.
var discouraged = regexp.MustCompile(`(?i)\bbroken\b|always fails|deprecated|do not (?:use|call)`)

// isLook reports whether a tool may be called without an order.
func (t tool) isLook() bool {
	return !isBookkeeping(t.name) && !isPlumbing(t.name) && !t.changes() && !discouraged.MatchString(t.description)
}

// isChanging knows the verbs in their base form and third person.
func isChanging(word string) bool {
	verbs := strings.Fields(changing)
	return slices.Contains(verbs, word) || slices.Contains(verbs, strings.TrimSuffix(word, "s")) ||
		slices.Contains(verbs, strings.TrimSuffix(word, "es"))
}
