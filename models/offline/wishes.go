package offline

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
)

// wish is what a person wants who says it in words that are known: calls to make, or what to say once there are
// none.
type wish struct {
	calls []call
	text  string
}

// Questions are matched without accents, and as a whole.
const (
	when    = `(?:\s+(?:today|yesterday|lately|recently|so far|since .*|this (?:week|morning|month)|last (?:night|week|hour)|overnight|hoy|ayer|ultimamente|esta (?:semana|manana|noche)|anoche))?`
	end     = `[\s?!.,]*$`
	asWords = `\s+(?:to me|for me|me|here|por mi|aqui)?`
)

var (
	greets = regexp.MustCompile(`^(?:hi|hello|hey|hiya|good (?:morning|afternoon|evening|day)|hola|buenos dias|buenas(?: tardes| noches| dias)?|que tal)(?: there| agent| all)?` + end)
	whoAsk = regexp.MustCompile(`^(?:(?:who|what) are you|(?:what is|what's|tell me) your name|quien eres|que eres|como te llamas|cual es tu nombre|` +
		`wer (?:bist du|sind sie)|wie hei(?:ß|ss)(?:t du|en sie)|(?:wie|was) ist dein name)` + end)
	thanks = regexp.MustCompile(`^(?:many |muchas |mil )?(?:thanks?|thank you|gracias)(?:\W.{0,40})?$`)
	helps  = regexp.MustCompile(`^(?:help|ayuda|what (?:all )?(?:can|do) you (?:do|know)|what can i (?:ask|do)(?: you)?|(?:what|which) tools (?:do you have|can you (?:use|call)|are there|may you call)|(?:list|show)(?: me)?(?: your| the)? tools|que (?:puedes|sabes) hacer|que herramientas (?:tienes|hay|puedes (?:usar|llamar)))(?:` + asWords + `)?` + end)
	did    = regexp.MustCompile(`^(?:tell me |show(?: me)? |dime |muestra(?:me)? )?(?:what (?:did|have) you (?:do|done|been doing|been up to)|what(?:'s| has| is| was)? (?:happened|happening|been happening|new|going on)|(?:your |the )?(?:recent|latest|last) activity|activity|que (?:hiciste|has hecho|paso|ha pasado|hay de nuevo)|(?:la |tu )?actividad(?: reciente)?)` + when + end)
	failed = regexp.MustCompile(`^(?:tell me |dime )?(?:what (?:has |have )?(?:failed|went wrong|gone wrong)|(?:recent |latest )?(?:errors|failures)|que (?:fallo|ha fallado|salio mal)|(?:los )?errores)` + when + end)
	papers = regexp.MustCompile(`\b(?:documents?|files?|attach\w*|pdf|documentos?|archivos?|ficheros?|adjunt\w*|dokument\w*|datei\w*|anhang|summari[sz]e|resume|fasse)\b`)
	goals  = regexp.MustCompile(`\b(?:objectives?|objetivos?)\b`)
	able   = regexp.MustCompile(`^(?:(?:list|show|which|what|muestra|lista|que)\b.{0,20})?\b(?:skills|habilidades)\b.{0,30}$`)
)

// Orders in words keep the person's spelling.
var (
	remembers = regexp.MustCompile(`(?is)^(?:remember|memori[sz]e|keep in mind|note|don't forget|recuerda|anota|memoriza|no olvides)(?:\s*:|\s+(?:that|this:|que)\s)\s*(\S.*)$`)
	forgets   = regexp.MustCompile(`(?is)^(?:forget|olvida)\s+(?:about\s+|that\s+|que\s+|lo\s+de\s+|what\s+you\s+(?:know|remember)\s+about\s+)?["'` + "`" + `]?(\S.*?)["'` + "`" + `]?[\s.!]*$`)
	recalls   = regexp.MustCompile(`(?is)^(?:tell me |dime )?(?:what do you (?:still )?(?:remember|recall)|do you (?:still )?remember|search (?:your|the) memory|qu[eé] recuerdas|recuerdas|te acuerdas|busca en (?:tu|la) memoria)(?:\s+(?:(?:about|of|from|for|del?|sobre|acerca de)\s+)?(.*?))?[\s?!.]*$`)
	proposes  = regexp.MustCompile(`(?is)^(?:propose|suggest|create|add|prop[oó]n(?:me)?|sugiere|crea|a[nñ]ade)\s+(?:(?:an?|the|un|el)\s+)?(?:new\s+|nuevo\s+)?(?:objective|objetivo)(?:\s*[:,]\s*|\s+(?:(?:to|that|of|de|para|que|named|called|llamado)\s+)?)(\S.*)$`)
	delegates = regexp.MustCompile(`(?is)^(?:delegate|delega)(?:\s+(?:this|the task|esto|la tarea))?\s*[:,]?\s+(\S.*)$`)
)

// wish recognises what a person says in words. The runtime's own prompts are none of these.
func (s situation) wish() (wish, bool) {
	if s.isTask() || s.said == "" && s.document == "" {
		return wish{}, false
	}
	for _, kind := range []func(situation) (wish, bool){remembering, forgetting, recalling, proposing, delegating, asking, reading} {
		if w, ok := kind(s); ok {
			return w, true
		}
	}
	return wish{}, false
}

// asking is for questions about the agent itself.
func asking(s situation) (wish, bool) {
	text := fold(s.asked)
	p := s.phrases()
	switch {
	case greets.MatchString(text):
		return wish{text: p.hello + s.introduction()}, true
	case whoAsk.MatchString(text) && s.identity != "":
		return wish{text: s.identity}, true
	case whoAsk.MatchString(text):
		return wish{text: p.hello + s.introduction()}, true
	case thanks.MatchString(text):
		return wish{text: p.welcome}, true
	case helps.MatchString(text):
		return wish{text: s.help()}, true
	case did.MatchString(text):
		return s.wants(map[string]any{"limit": 50}, "recent_activity"), true
	case failed.MatchString(text):
		return s.wants(map[string]any{"limit": 50, "status": "error"}, "recent_activity"), true
	case goals.MatchString(text) && len(strings.Fields(text)) <= 12 && s.ordersNone():
		return s.wants(nil, "objectives_list"), true
	case able.MatchString(text) && s.ordersNone():
		if _, offered := s.tool("skill_list"); !offered {
			return wish{text: s.help()}, true
		}
		return s.wants(nil, "skill_list"), true
	}
	return wish{}, false
}

// reading is for questions about an attached document, which is answered with its first lines.
func reading(s situation) (wish, bool) {
	if _, offered := s.tool("document_read"); !offered || s.document == "" || !s.ordersNone() ||
		s.said != "" && !papers.MatchString(fold(s.said)) {
		return wish{}, false
	}
	w := s.wants(map[string]any{"document": s.document}, "document_read")
	for _, c := range s.made {
		object, _ := mustDecode(c.result).(map[string]any)
		if text, _ := object["text"].(string); c.name == "document_read" && c.succeeded() && text != "" {
			lines := strings.SplitN(strings.TrimSpace(text), "\n", linesShown+1)
			w.text = plain(object["name"]) + ":\n" + clip(strings.Join(lines[:min(len(lines), linesShown)], "\n"), maxFact)
		}
	}
	return w, true
}

const linesShown = 3 // of a document

func (s situation) ordersNone() bool {
	for _, t := range s.tools {
		if _, ordered := t.order(s.said); ordered {
			return false
		}
	}
	return s.unknownOrder() == ""
}

// wants is the call of the first of some tools that is offered. Where none is, that is said.
func (s situation) wants(values map[string]any, names ...string) wish {
	for _, name := range names {
		if t, offered := s.tool(name); offered {
			c, ok := s.fillWith(t, values)
			if ok {
				return wish{calls: []call{c}}
			}
			return wish{text: fmt.Sprintf(s.phrases().needs, t.name, strings.Join(required(t.schema), ", "))}
		}
	}
	return wish{text: fmt.Sprintf(s.phrases().notOffered, names[0])}
}

func remembering(s situation) (wish, bool) {
	m := remembers.FindStringSubmatch(s.asked)
	if m == nil || strings.HasSuffix(m[1], "?") {
		return wish{}, false
	}
	fact := strings.TrimSpace(m[1])
	values := map[string]any{"key": memoryKey(fact), "value": fact}
	if revision, taken := s.inTheWay("memory_write"); taken { // the key holds something, which is replaced now that it was read
		values["revision"] = revision
	}
	return s.wants(values, "memory_write", "remember"), true
}

// inTheWay is the revision of the memory that a call was about to replace, or to forget, unread.
func (s situation) inTheWay(name string) (revision json.Number, taken bool) {
	for _, c := range s.made {
		if object, _ := mustDecode(c.result).(map[string]any); c.name == name && c.failed {
			theirs, _ := object["theirs"].(map[string]any)
			revision, taken = theirs["revision"].(json.Number)
		}
	}
	return revision, taken
}

func recalling(s situation) (wish, bool) {
	m := recalls.FindStringSubmatch(s.asked)
	if m == nil {
		return wish{}, false
	}
	values := map[string]any{}
	if m[1] != "" {
		values["query"] = m[1]
	}
	return s.wants(values, "memory_search", "recall"), true
}

func proposing(s situation) (wish, bool) {
	m := proposes.FindStringSubmatch(s.asked)
	if m == nil {
		return wish{}, false
	}
	name, goal := strings.Join(firstWords(m[1]), " "), strings.TrimSpace(m[1])
	if quoted := quotation.FindStringSubmatchIndex(goal); quoted != nil && quoted[0] == 0 {
		name, goal = goal[quoted[2]:quoted[3]], strings.TrimLeft(goal[quoted[1]:], " :,.")
	}
	if goal == "" {
		goal = name
	}
	return s.wants(map[string]any{"name": name, "goal": goal}, "objective_propose"), true
}

func delegating(s situation) (wish, bool) {
	m := delegates.FindStringSubmatch(s.asked)
	if m == nil || strings.HasPrefix(m[1], "{") {
		return wish{}, false
	}
	return s.wants(map[string]any{"task": m[1]}, "delegate"), true
}

// introduction says in two sentences who speaks, and what it may call.
func (s situation) introduction() string {
	p := s.phrases()
	names := make([]string, 0, len(s.tools))
	for _, t := range s.tools {
		names = append(names, t.name)
	}
	if len(names) == 0 {
		return p.about + p.none
	}
	return p.about + fmt.Sprintf(p.may, strings.Join(names, ", "))
}

// help lists the tools with what they do.
func (s situation) help() string {
	p := s.phrases()
	if len(s.tools) == 0 {
		return p.about + p.none
	}
	var b strings.Builder
	b.WriteString(p.can)
	for _, t := range s.tools {
		b.WriteString("\n- " + t.name)
		if t.changes() {
			b.WriteString(p.onlyOrdered)
		}
		if about := strings.Join(strings.Fields(t.description), " "); about != "" {
			b.WriteString(": " + clip(about, maxAbout))
		}
	}
	b.WriteString("\n" + p.canSay)
	return b.String()
}

const maxAbout = 200 // bytes of a description
