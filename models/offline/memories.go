package offline

import (
	"fmt"
	"slices"
	"strings"
)

// kept is an entry of the agent's memory, as a tool has returned it.
type kept struct{ category, key, value string }

// memoryKey is a stable key for a fact: of "the backup window is 3 to 4" it is backup_window, so that the next such
// fact replaces this one.
func memoryKey(fact string) string {
	subject := fact
	for _, verb := range []string{" is ", " are ", " es ", " son ", ": ", " = "} {
		if before, _, has := strings.Cut(fact, verb); has && len(before) < len(subject) && len(firstWords(before)) > 0 {
			subject = before
		}
	}
	if key := strings.Join(firstWords(subject), "_"); key != "" {
		return key
	}
	return "note"
}

// firstWords are the first few words of a text that say something, as they are spelt but in lower case.
func firstWords(text string) []string {
	var list []string
	for _, field := range strings.FieldsFunc(fold(text), func(r rune) bool { return (r < 'a' || r > 'z') && (r < '0' || r > '9') }) {
		if !isSmall(field) && len(list) < 6 {
			list = append(list, clip(field, 30))
		}
	}
	return list
}

// forgetting looks a memory up before it is deleted: a key that does not exist deletes nothing, and one that is
// only alike is somebody else's.
func forgetting(s situation) (wish, bool) {
	m := forgets.FindStringSubmatch(s.asked)
	if m == nil {
		return wish{}, false
	}
	target := strings.TrimSpace(m[1])
	switch fold(target) {
	case "it", "that", "this", "about it", "everything", "all", "eso", "esto", "todo":
		return wish{}, false
	}
	if category, key, both := strings.Cut(target, "/"); both && strings.TrimSpace(category) != "" && strings.TrimSpace(key) != "" {
		values := map[string]any{"category": strings.TrimSpace(category), "key": strings.TrimSpace(key)}
		if revision, there := s.inTheWay("memory_forget"); there {
			values["revision"] = revision
		}
		return s.wants(values, "memory_forget"), true
	}
	if _, offered := s.tool("memory_forget"); !offered {
		return s.wants(nil, "memory_forget"), true
	}
	for _, look := range []string{"memory_search", "recall"} {
		if !s.offered(look) {
			continue
		}
		if i := slices.IndexFunc(s.made, func(c call) bool { return c.name == look }); i >= 0 {
			return s.forgetFound(target, s.made[i]), true
		}
		return s.wants(map[string]any{"query": target}, look), true
	}
	return s.wants(map[string]any{"key": target}, "memory_forget"), true
}

func (s situation) offered(name string) bool {
	_, offered := s.tool(name)
	return offered
}

// forgetFound deletes the memory that is meant: the one with this key, or the only one that has all the words.
func (s situation) forgetFound(target string, search call) wish {
	if s.has("memory_forget") || !search.succeeded() {
		return wish{}
	}
	var alike []kept
	for _, m := range keptIn(search.result) {
		if m.key == target || m.key == memoryKey(target) {
			return s.wants(map[string]any{"category": m.category, "key": m.key}, "memory_forget")
		}
		if wanted := words(target); len(wanted) > 0 && overlap(words(m.key+" "+m.value), wanted) == len(wanted) {
			alike = append(alike, m)
		}
	}
	p := s.phrases()
	switch len(alike) {
	case 0:
		return wish{text: fmt.Sprintf(p.noMemory, target)}
	case 1:
		return s.wants(map[string]any{"category": alike[0].category, "key": alike[0].key}, "memory_forget")
	}
	names := make([]string, 0, len(alike))
	for _, m := range alike {
		names = append(names, "forget "+m.category+"/"+m.key)
	}
	return wish{text: fmt.Sprintf(p.manyMemories, target, strings.Join(names, ", "))}
}

// keptIn reads the answer of memory_search.
func keptIn(result string) []kept {
	object, _ := mustDecode(result).(map[string]any)
	list, _ := object["memories"].([]any)
	var found []kept
	for _, item := range list {
		if m, ok := item.(map[string]any); ok {
			found = append(found, kept{plain(m["category"]), plain(m["key"]), plain(m["value"])})
		}
	}
	return found
}
