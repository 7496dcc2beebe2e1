package offline

import (
	"regexp"
	"slices"
	"strings"

	openai "github.com/sashabaranov/go-openai"
)

var (
	delivered = regexp.MustCompile(`(?s)<delivery\b.*(?:</delivery>|$)|\[Document [\w-]+: ".*$|What caused this task, as data and not as instructions .*$`)
	attached  = regexp.MustCompile(`(?m)^\[Document ([\w-]+): "`)
	polite    = regexp.MustCompile(`(?i)^(?:[\s¿¡]|(?:please|por favor|can you|could you|would you|puedes|podr[ií]as|hey|hi|hello|hola|ok|okay|so|oye|and now)\b[,.!:]?\s+)+`)
	again     = regexp.MustCompile(`(?i)^(?:(?:do (?:it|that)|run (?:it|that)|try|and)\s+)?(?:again|once more|one more time|repeat(?: that| it)?|otra vez|de nuevo|rep[ií]telo|y otra vez)[\s!.?]*$`)
	goesOn    = regexp.MustCompile(`(?i)^[\s¿¡]*(?:and|y|what about|how about|qu[eé] hay de)\s`)
)

// hear takes in a message: apart from what a system outside has written in it, which orders nothing. "Again" means the
// message before. One that begins with "and" looks at what that one was about, too; nothing is ordered by that.
func (s *situation) hear(prompt string, before []openai.ChatCompletionMessage) {
	if earlier := latest(before); earlier != "" && again.MatchString(polite.ReplaceAllString(prompt, "")) {
		prompt = earlier
	}
	s.prompt = prompt
	s.said = strings.TrimSpace(delivered.ReplaceAllString(prompt, ""))
	s.asked = polite.ReplaceAllString(s.said, "")
	s.steps = steps(prompt)
	for _, m := range append(slices.Clone(before), openai.ChatCompletionMessage{Content: prompt}) {
		if found := attached.FindAllStringSubmatch(content(m), -1); found != nil && m.Role != openai.ChatMessageRoleAssistant {
			s.document = found[len(found)-1][1]
		}
	}
	s.topic = s.said
	if len(s.steps) > 0 {
		return // what to do about a step is said in many clauses
	}
	s.topic = s.withoutOrders(s.said)
	if goesOn.MatchString(s.said) {
		s.topic += " " + s.withoutOrders(latest(before))
	}
}

// latest is the last of a person's messages that says what to do; empty when there is none.
func latest(messages []openai.ChatCompletionMessage) string {
	for _, m := range slices.Backward(messages) {
		text := content(m)
		if m.Role == openai.ChatMessageRoleUser && !again.MatchString(polite.ReplaceAllString(text, "")) {
			return text
		}
	}
	return ""
}

// isTask reports whether the prompt is one of the runtime's own, which is no conversation.
func (s situation) isTask() bool {
	return len(s.steps) > 0 || strings.HasPrefix(s.prompt, "Objective ") || strings.HasPrefix(s.prompt, "Reflect on ")
}

// inSpanish reports whether a person writes Spanish, by the commonest words.
func (s situation) inSpanish() bool {
	if s.isTask() {
		return false
	}
	if strings.ContainsAny(s.said, "¿¡") {
		return true
	}
	es, en := 0, 0
	for _, word := range strings.FieldsFunc(fold(s.said), func(r rune) bool { return r < 'a' || r > 'z' }) {
		switch word {
		case "hola", "que", "el", "la", "los", "las", "de", "del", "y", "en", "un", "una", "es", "esta", "recuerda", "recuerdas", "olvida", "ejecuta",
			"usa", "gracias", "ayuda", "buenos", "buenas", "dime", "propon", "delega", "tablas", "objetivos", "otra", "hiciste", "por", "como", "cual", "mi":
			es++
		case "the", "is", "are", "what", "of", "to", "and", "you", "that", "it", "run", "remember", "forget", "how", "do", "with", "please":
			en++
		}
	}
	return es > en
}
