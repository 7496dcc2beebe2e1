package reason

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"unicode"

	"github.com/lanekeeper/lanekeeper/skills"
)

// matching returns the skills that have to do with a query, best first.
func matching(list []skills.Skill, query string) []skills.Skill {
	return rank(list, query, true)
}

// nearestSkills orders all skills by how much they have to do with a text; equals stay in order.
func nearestSkills(list []skills.Skill, text string) []skills.Skill {
	return rank(list, text, false)
}

// rank scores skills by the words they share with a text: those of the name count more than those of the
// description, whole words more than beginnings, and rare words more than common ones.
func rank(list []skills.Skill, text string, onlyHits bool) []skills.Skill {
	type scored struct {
		skill skills.Skill
		score float64
	}
	query := words(text)
	all := make([]scored, len(list))
	for i, s := range list {
		all[i].skill = s
	}
	for _, word := range query {
		points := make([]float64, len(list))
		hits := 0
		for i, s := range list {
			points[i] = 3*likeness(word, words(s.Name)) + likeness(word, words(s.Description))
			if points[i] > 0 {
				hits++
			}
		}
		rarity := math.Log(1 + float64(len(list))/float64(max(hits, 1)))
		for i := range all {
			all[i].score += points[i] * rarity
		}
	}
	slices.SortStableFunc(all, func(a, b scored) int { return cmp.Compare(b.score, a.score) })
	var ranked []skills.Skill
	for _, a := range all {
		if a.score > 0 || !onlyHits {
			ranked = append(ranked, a.skill)
		}
	}
	return ranked
}

// likeness is 1 for a word that is among others, and less for one that begins alike.
func likeness(word string, others []string) float64 {
	best := 0.0
	for _, other := range others {
		switch short, long := min(len(word), len(other)), max(len(word), len(other)); {
		case word == other:
			return 1
		case short >= 3 && word[:short] == other[:short] && long-short <= 4:
			best = 0.6
		}
	}
	return best
}

// words splits a text at everything that is neither letter nor digit, and at the humps of camelCase. Each word is
// there once, in lower case.
func words(text string) []string {
	var spaced strings.Builder
	var before rune
	for _, r := range text {
		if unicode.IsUpper(r) && unicode.IsLower(before) {
			spaced.WriteByte(' ')
		}
		spaced.WriteRune(r)
		before = r
	}
	var list []string
	for word := range strings.FieldsFuncSeq(strings.ToLower(spaced.String()), func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r)
	}) {
		if !slices.Contains(list, word) {
			list = append(list, word)
		}
	}
	return list
}
